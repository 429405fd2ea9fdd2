//! Reads audit logs back, and finds the first line that is not what was written.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use mvm_proto::TenantId;
use mvm_proto::text::chain;
use serde::Serialize;

use super::file::{self, DROPPED, Head, LOST, Mark, RECOVERED, dir_of};
use super::line::{self, Line, MAX_LINE_BYTES, beginning};

/// How many of a log's own notes a report repeats.
const MAX_NOTES: usize = 100;

/// What a log was found to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    pub tenant: Option<TenantId>,
    pub files: Vec<PathBuf>,
    pub lines: u64,
    /// The first line that is there; above 1, older ones were rotated away and the chain is known from here on.
    pub known_from: Option<u64>,
    /// The last line that is good. A copy of it kept elsewhere proves the log up to there.
    pub last: Option<Mark>,
    /// What the log says of itself.
    pub notes: Vec<Note>,
    /// The first thing that is wrong; absent: nothing is.
    pub broken: Option<Broken>,
}

/// A repair or a loss that the log's writer owned up to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Note {
    pub file: PathBuf,
    pub line: u64,
    pub action: String,
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Broken {
    pub file: PathBuf,
    /// From 1.
    pub line: u64,
    pub kind: Kind,
    pub why: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A line is not what was written.
    Changed,
    /// Lines between two others are not there.
    Missing,
    /// A line stands where another one belongs.
    Reordered,
    /// The log's end is not there.
    Truncated,
}

impl Kind {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Changed => "changed",
            Kind::Missing => "missing",
            Kind::Reordered => "reordered",
            Kind::Truncated => "truncated",
        }
    }
}

/// The tenants that have a log below `data_dir`.
pub fn tenants(data_dir: &Path) -> io::Result<Vec<TenantId>> {
    let mut found = Vec::new();
    let dir = match fs::read_dir(data_dir.join("tenants")) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(found),
        dir => dir?,
    };
    for item in dir {
        let item = item?;
        let tenant = item.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(tenant) = tenant
            && has_log(&item.path())?
        {
            found.push(tenant);
        }
    }
    found.sort();
    Ok(found)
}

/// Removing a log's files leaves its head, and that is a log that lost everything.
fn has_log(dir: &Path) -> io::Result<bool> {
    Ok(dir.is_dir() && (!file::files(dir)?.is_empty() || dir.join(file::HEAD).exists()))
}

/// Checks all of a tenant's files and that they reach as far as its head says.
pub fn verify_tenant(data_dir: &Path, tenant: &TenantId) -> io::Result<Report> {
    let dir = dir_of(data_dir, tenant);
    // The head first: what is written meanwhile only makes the log longer.
    let head = file::read_head(&dir);
    let files: Vec<_> = file::files(&dir)?.into_iter().map(|(_, path)| path).collect();
    let newest = files.last().cloned().unwrap_or_else(|| dir.join(file::LOG));
    let mut check = Check::new(Some(tenant.clone()), files);
    check.head = head.as_ref().ok().copied().flatten();
    check.run()?;
    if check.report.broken.is_none()
        && let Some((kind, why)) = check.at_end(head)
    {
        check.report.broken = Some(Broken { file: newest, line: check.line, kind, why });
    }
    Ok(check.report)
}

/// Checks these files as one chain, in this order. Nothing says where it should end.
pub fn verify_files(files: &[PathBuf]) -> io::Result<Report> {
    let mut check = Check::new(None, files.to_vec());
    check.run()?;
    Ok(check.report)
}

/// The lines of a tenant's log that can be read, oldest first.
pub fn lines_of(data_dir: &Path, tenant: &TenantId, mut each: impl FnMut(Line)) -> io::Result<()> {
    for (_, path) in file::files(&dir_of(data_dir, tenant))? {
        for_each_line(&path, |bytes, _| line::read(bytes).into_iter().for_each(&mut each))?;
    }
    Ok(())
}

/// A walk along the chain.
#[derive(Debug)]
struct Check {
    report: Report,
    /// Where the walk is, in the file it is in.
    line: u64,
    head: Option<Head>,
    head_seen: bool,
    /// A line that was found missing, and might come later.
    awaited: Option<u64>,
}

impl Check {
    fn new(tenant: Option<TenantId>, files: Vec<PathBuf>) -> Self {
        let report =
            Report { tenant, files, lines: 0, known_from: None, last: None, notes: Vec::new(), broken: None };
        Self { report, line: 0, head: None, head_seen: false, awaited: None }
    }

    fn run(&mut self) -> io::Result<()> {
        for path in self.report.files.clone() {
            self.line = 0;
            for_each_line(&path, |bytes, is_whole| self.step(&path, bytes, is_whole))?;
        }
        Ok(())
    }

    fn step(&mut self, path: &Path, bytes: &[u8], is_whole: bool) {
        self.line += 1;
        self.report.lines += 1;
        let read = line::read(bytes);
        if let Some(broken) = &mut self.report.broken {
            if read.is_ok_and(|line| Some(line.seq) == self.awaited) && broken.kind == Kind::Missing {
                broken.kind = Kind::Reordered;
                broken.why = format!("{}, which comes later", broken.why);
            }
            return;
        }
        let wrong = match &read {
            Err(_) if !is_whole => Some((Kind::Truncated, "the last line is not whole".to_owned())),
            Err(error) => Some((Kind::Changed, chain(error))),
            Ok(_) if !is_whole => Some((Kind::Truncated, "the last line does not end".to_owned())),
            Ok(line) => self.follows(line),
        };
        match (wrong, read) {
            (Some((kind, why)), _) => {
                self.report.broken = Some(Broken { file: path.to_owned(), line: self.line, kind, why });
            }
            (None, Ok(line)) => self.advance(path, line),
            (None, Err(_)) => {}
        }
    }

    /// Why `line` can't be the next one.
    fn follows(&mut self, line: &Line) -> Option<(Kind, String)> {
        if let Some(tenant) = &self.report.tenant
            && *tenant != line.tenant
        {
            return Some((Kind::Changed, format!("it is of tenant {}, not of {tenant}", line.tenant)));
        }
        let Some(last) = self.report.last else {
            if let Some(head) = self.head
                && head.from < line.seq
            {
                let why = format!("this is line {}, the log is kept from line {} on", line.seq, head.from);
                self.awaited = Some(head.from);
                return Some((Kind::Missing, why));
            }
            let is_first = line.seq != 1 || line.prev == beginning(&line.tenant);
            return (!is_first).then(|| (Kind::Changed, "it does not begin its tenant's chain".to_owned()));
        };
        let next = last.seq + 1;
        if line.seq > next {
            self.awaited = Some(next);
            let gap = if line.seq - next == 1 { String::new() } else { format!(" to {}", line.seq - 1) };
            return Some((
                Kind::Missing,
                format!("this is line {}, before it belongs line {next}{gap}", line.seq),
            ));
        }
        if line.seq < next {
            let why = format!("this is line {}, here belongs line {next}", line.seq);
            return Some((Kind::Reordered, why));
        }
        if line.prev != last.hash {
            let why = "the line before it is not the one it was written after".to_owned();
            return Some((Kind::Changed, why));
        }
        (line.action == LOST)
            .then(|| (Kind::Truncated, format!("lines before this one were lost: {}", line.reason)))
    }

    fn advance(&mut self, path: &Path, line: Line) {
        let at = Mark { seq: line.seq, hash: line.hash };
        self.head_seen |= self.head.is_some_and(|head| (head.seq, head.hash) == (at.seq, at.hash));
        self.report.last = Some(at);
        self.report.known_from.get_or_insert(line.seq);
        self.report.tenant.get_or_insert(line.tenant);
        if matches!(line.action.as_str(), RECOVERED | DROPPED) && self.report.notes.len() < MAX_NOTES {
            let (file, action, reason) = (path.to_owned(), line.action, line.reason);
            self.report.notes.push(Note { file, line: self.line, action, reason });
        }
    }

    /// What is wrong with where the log ends.
    fn at_end(&self, head: io::Result<Option<Head>>) -> Option<(Kind, String)> {
        let last = self.report.last.map_or(0, |last| last.seq);
        match head {
            Ok(Some(head)) if head.seq > last => {
                let why = format!("the log ends with line {last}, its head says line {}", head.seq);
                Some((Kind::Truncated, why))
            }
            // A head may be older than all files that are kept.
            Ok(Some(head)) if head.seq >= self.report.known_from.unwrap_or(1) && !self.head_seen => {
                Some((Kind::Changed, format!("line {} is not the one that the log's head names", head.seq)))
            }
            Ok(Some(_)) => None,
            Ok(None) if last == 0 => None,
            Ok(None) => {
                Some((Kind::Truncated, "its head is not there, so nothing vouches for its end".to_owned()))
            }
            Err(cause) => Some((Kind::Truncated, format!("its head can't be read: {}", chain(&cause)))),
        }
    }
}

/// Gives every line without its line feed, and whether it had one.
fn for_each_line(path: &Path, mut each: impl FnMut(&[u8], bool)) -> io::Result<()> {
    let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NOFOLLOW).open(path)?;
    let mut reader = BufReader::new(file);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        // A file of another kind may have no line feed at all.
        (&mut reader).take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut bytes)?;
        match bytes.split_last() {
            None => return Ok(()),
            Some((b'\n', line)) => each(line, true),
            // Too long to be a line: in pieces, none of which is one.
            Some(_) => each(&bytes, bytes.len() == MAX_LINE_BYTES),
        }
    }
}
