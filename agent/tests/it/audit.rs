//! Audit logs: what is appended can be read back, and whatever is done to a log afterwards is found.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mvm_agent::audit::{
    AuditLog, AuditSettings, Entry, Kind, Report, lines_of, tenants, verify_files, verify_tenant,
};
use mvm_agent::clock::Clock;
use mvm_proto::{TenantId, Timestamp};

const SMALL: AuditSettings = AuditSettings { max_bytes: 2000, keep_files: 3 };
const CHILD_DIR: &str = "MVM_TEST_AUDIT_DIR";

fn acme() -> TenantId {
    "acme".parse().unwrap()
}

fn entry(number: u64) -> Entry {
    Entry {
        at: Timestamp::from_unix_ms(1_800_000_000_000 + i64::try_from(number).unwrap()),
        tenant: acme(),
        pool: Some("web".parse().unwrap()),
        instance: None,
        actor: "reconcile".to_owned(),
        action: "create".to_owned(),
        reason: format!("entry {number}"),
        outcome: "done".to_owned(),
    }
}

fn open(dir: &Path, settings: AuditSettings) -> AuditLog {
    AuditLog::open(dir, settings, Clock::system())
}

async fn written(dir: &Path, settings: AuditSettings, count: u64) {
    let log = open(dir, settings);
    (1..=count).for_each(|number| log.append(entry(number)));
    log.flush().await.unwrap();
}

fn log_path(dir: &Path) -> PathBuf {
    dir.join("tenants/acme/audit.log")
}

fn verify(dir: &Path) -> Report {
    verify_tenant(dir, &acme()).unwrap()
}

fn found(dir: &Path) -> Option<(Kind, u64)> {
    verify(dir).broken.map(|broken| (broken.kind, broken.line))
}

fn lines(dir: &Path) -> Vec<String> {
    fs::read_to_string(log_path(dir)).unwrap().lines().map(ToOwned::to_owned).collect()
}

fn write_lines(dir: &Path, lines: &[String]) {
    fs::write(log_path(dir), lines.concat_lines()).unwrap();
}

trait ConcatLines {
    fn concat_lines(&self) -> String;
}

impl ConcatLines for [String] {
    fn concat_lines(&self) -> String {
        self.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
    }
}

fn reasons(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    lines_of(dir, &acme(), |line| found.push(line.reason)).unwrap();
    found
}

#[tokio::test]
async fn what_is_appended_is_read_back_in_order_and_the_chain_holds() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), AuditSettings::default(), 50).await;
    let report = verify(dir.path());
    assert_eq!((report.broken, report.lines, report.known_from), (None, 50, Some(1)));
    assert_eq!(reasons(dir.path()), (1..=50).map(|n| format!("entry {n}")).collect::<Vec<_>>());
    assert_eq!(tenants(dir.path()).unwrap(), [acme()]);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&log_path(dir.path())), mode(&dir.path().join("tenants/acme"))), (0o600, 0o700));
}

#[tokio::test]
async fn a_log_that_is_opened_again_goes_on_where_it_ended() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        written(dir.path(), AuditSettings::default(), 4).await;
    }
    let report = verify(dir.path());
    assert_eq!((report.broken, report.lines, report.last.unwrap().seq), (None, 12, 12));
}

#[tokio::test]
async fn tenants_have_logs_and_chains_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path(), AuditSettings::default());
    for number in 1..=6 {
        let tenant = if number % 2 == 0 { "globex" } else { "acme" };
        log.append(Entry { tenant: tenant.parse().unwrap(), ..entry(number) });
    }
    log.flush().await.unwrap();
    for tenant in tenants(dir.path()).unwrap() {
        let report = verify_tenant(dir.path(), &tenant).unwrap();
        assert_eq!((report.broken, report.lines), (None, 3), "{tenant}");
    }
    // A log in another tenant's place is not that tenant's.
    fs::copy(dir.path().join("tenants/globex/audit.log"), log_path(dir.path())).unwrap();
    assert_eq!(found(dir.path()), Some((Kind::Changed, 1)));
}

#[tokio::test]
async fn every_kind_of_edit_of_every_line_is_found() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), AuditSettings::default(), 8).await;
    let good = lines(dir.path());
    for at in 0..good.len() {
        let number = at as u64 + 1;
        let try_edit = |edited: Vec<String>, expected: (Kind, u64)| {
            write_lines(dir.path(), &edited);
            assert_eq!(found(dir.path()), Some(expected), "line {number}");
        };
        // One byte of each field, and of what stands between them.
        for (from, to) in [
            ("\"seq\":", "\"seq\": "),
            ("18000", "28000"),
            ("2027", "2028"),
            ("acme", "acne"),
            ("web", "wed"),
            ("reconcile", "recondite"),
            ("create", "delete"),
            ("entry", "Entry"),
            ("done", "none"),
            ("\"prev\":\"sha256:", "\"prev\":\"sha256:0"),
            ("\"hash\":\"sha256:", "\"hash\":\"sha256:0"),
            ("}", "} "),
        ] {
            let mut edited = good.clone();
            edited[at] = edited[at].replacen(from, to, 1);
            if edited[at] != good[at] {
                try_edit(edited, (Kind::Changed, number));
            }
        }
        let mut deleted = good.clone();
        deleted.remove(at);
        let expected = match at {
            at if at + 1 == good.len() => (Kind::Truncated, number - 1),
            _ => (Kind::Missing, number),
        };
        try_edit(deleted, expected);
        let mut doubled = good.clone();
        doubled.insert(at, good[at].clone());
        try_edit(doubled, (Kind::Reordered, number + 1));
        let mut emptied = good.clone();
        emptied[at].clear();
        try_edit(emptied, (Kind::Changed, number));
        if at + 1 < good.len() {
            let mut swapped = good.clone();
            swapped.swap(at, at + 1);
            try_edit(swapped, (Kind::Reordered, number));
        }
    }
    write_lines(dir.path(), &good);
    assert_eq!(found(dir.path()), None);
}

#[tokio::test]
async fn a_log_that_is_cut_anywhere_is_found_to_be() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), AuditSettings::default(), 3).await;
    let good = fs::read(log_path(dir.path())).unwrap();
    for length in 0..good.len() {
        fs::write(log_path(dir.path()), &good[..length]).unwrap();
        let report = verify(dir.path());
        assert_eq!(report.broken.map(|broken| broken.kind), Some(Kind::Truncated), "{length} bytes");
    }
    fs::remove_file(log_path(dir.path())).unwrap();
    assert_eq!(tenants(dir.path()).unwrap(), [acme()], "its head is still there");
    assert_eq!(found(dir.path()).unwrap().0, Kind::Truncated);
    fs::write(log_path(dir.path()), &good).unwrap();
    fs::remove_file(dir.path().join("tenants/acme/audit.head")).unwrap();
    assert_eq!(found(dir.path()).unwrap().0, Kind::Truncated);
}

#[tokio::test]
async fn a_chain_goes_on_over_rotated_files_and_is_known_from_the_oldest_that_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), SMALL, 60).await;
    let report = verify(dir.path());
    assert_eq!((report.broken.clone(), report.files.len()), (None, 4));
    assert_eq!(report.last.unwrap().seq, 60);
    assert!(report.known_from.unwrap() > 1, "{report:?}");
    assert!(report.files.iter().all(|file| fs::metadata(file).unwrap().len() <= SMALL.max_bytes));
    // Opened again, it goes on.
    written(dir.path(), SMALL, 1).await;
    assert_eq!((verify(dir.path()).broken, verify(dir.path()).last.unwrap().seq), (None, 61));
    // The boundary is part of the chain.
    let oldest_but_one = &report.files[1];
    let text = fs::read_to_string(oldest_but_one).unwrap();
    let (_, rest) = text.split_once('\n').unwrap();
    fs::write(oldest_but_one, rest).unwrap();
    let broken = verify(dir.path()).broken.unwrap();
    assert_eq!((broken.kind, &broken.file, broken.line), (Kind::Missing, oldest_but_one, 1));
    fs::remove_file(oldest_but_one).unwrap();
    assert_eq!(verify(dir.path()).broken.unwrap().kind, Kind::Missing);
    fs::remove_file(&report.files[0]).unwrap();
    assert_eq!(verify(dir.path()).broken.unwrap().kind, Kind::Missing, "the oldest file was to be kept");
}

#[tokio::test]
async fn a_rotation_that_was_cut_short_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), SMALL, 8).await;
    let at = |name: &str| dir.path().join("tenants/acme").join(name);
    // Killed after the renames, before the new file: the newest lines are in `.1`.
    fs::rename(at("audit.log.1"), at("audit.log.2")).unwrap();
    fs::rename(at("audit.log"), at("audit.log.1")).unwrap();
    assert_eq!(found(dir.path()), None);
    written(dir.path(), SMALL, 1).await;
    let report = verify(dir.path());
    assert_eq!((report.broken, report.last.unwrap().seq), (None, 9));
}

#[tokio::test]
async fn a_half_written_line_is_cut_off_at_the_next_open_and_a_line_says_so() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), AuditSettings::default(), 2).await;
    let mut torn = fs::read(log_path(dir.path())).unwrap();
    torn.extend_from_slice(b"{\"seq\":3,\"at\":\"20");
    torn.extend_from_slice(&[0; 40]);
    fs::write(log_path(dir.path()), torn).unwrap();
    assert_eq!(found(dir.path()), Some((Kind::Truncated, 3)));
    written(dir.path(), AuditSettings::default(), 1).await;
    let report = verify(dir.path());
    assert_eq!((report.broken, report.lines), (None, 4));
    assert_eq!(report.notes[0].reason, "the last 57 bytes were not a whole line and were cut off");
}

#[tokio::test]
async fn lines_that_were_taken_from_the_end_are_told_of_forever() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), AuditSettings::default(), 5).await;
    write_lines(dir.path(), &lines(dir.path())[..3]);
    written(dir.path(), AuditSettings::default(), 1).await;
    let broken = verify(dir.path()).broken.unwrap();
    assert_eq!((broken.kind, broken.line), (Kind::Truncated, 4));
    assert!(broken.why.contains("the log ended with line 3, its head file says line 5"), "{}", broken.why);
}

#[tokio::test]
async fn files_by_name_are_one_chain() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), SMALL, 20).await;
    let files = verify(dir.path()).files;
    assert_eq!(verify_files(&files).unwrap().broken, None);
    let backwards: Vec<_> = files.iter().rev().cloned().collect();
    assert_eq!(verify_files(&backwards).unwrap().broken.unwrap().kind, Kind::Reordered);
    fs::write(dir.path().join("other"), [b'x'; 200_000]).unwrap();
    let other = verify_files(&[dir.path().join("other")]).unwrap();
    assert_eq!(other.broken.unwrap().kind, Kind::Changed);
}

#[tokio::test(start_paused = true)]
async fn what_can_not_be_written_is_kept_told_of_and_written_when_it_can() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tenants"), "in the way").unwrap();
    let log = open(dir.path(), AuditSettings::default());
    (1..=3).for_each(|number| log.append(entry(number)));
    assert!(log.flush().await.is_err());
    assert!(log.health().failing.is_some_and(|why| why.contains("acme")), "{:?}", log.health());
    fs::remove_file(dir.path().join("tenants")).unwrap();
    log.append(entry(4));
    log.flush().await.unwrap();
    assert_eq!((log.health().written, log.health().dropped, log.health().failing), (4, 0, None));
    assert_eq!(reasons(dir.path()), ["entry 1", "entry 2", "entry 3", "entry 4"]);
}

#[tokio::test]
async fn entries_that_could_not_be_kept_are_counted_in_the_log_itself() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tenants"), "in the way").unwrap();
    let log = open(dir.path(), AuditSettings::default());
    for number in 1..=2000 {
        log.append(entry(number));
    }
    assert!(log.flush().await.is_err());
    let dropped = log.health().dropped;
    assert!(dropped > 0);
    fs::remove_file(dir.path().join("tenants")).unwrap();
    log.flush().await.unwrap();
    let report = verify(dir.path());
    assert_eq!(report.broken, None);
    assert_eq!(report.lines, 2000 - dropped + 1);
    assert!(report.notes[0].reason.starts_with(&format!("dropped {dropped} entries")), "{:?}", report.notes);
}

#[tokio::test]
async fn a_full_disk_leaves_whole_lines_only() {
    let full = PathBuf::from("/dev/full");
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), AuditSettings::default(), 2).await;
    // Where links are not followed, one to a device that is always full is an error like any other.
    let aside = dir.path().join("aside");
    fs::rename(log_path(dir.path()), &aside).unwrap();
    std::os::unix::fs::symlink(&full, log_path(dir.path())).unwrap();
    let log = open(dir.path(), AuditSettings::default());
    log.append(entry(3));
    assert!(log.flush().await.is_err());
    fs::rename(&aside, log_path(dir.path())).unwrap();
    log.flush().await.unwrap();
    assert_eq!((found(dir.path()), verify(dir.path()).lines), (None, 3));
}

#[tokio::test]
#[ignore = "run by the test below, as its child"]
async fn appends_until_it_is_killed() {
    let dir = std::env::var_os(CHILD_DIR).expect("its parent says where");
    let log = open(Path::new(&dir), SMALL);
    for number in 1.. {
        for part in 0..5 {
            log.append(entry(number * 5 + part));
        }
        log.flush().await.unwrap();
        println!("kept {}", number * 5 + 4);
    }
}

#[tokio::test]
async fn an_agent_killed_while_it_appends_loses_nothing_that_was_flushed() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..5 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "audit::appends_until_it_is_killed", "--ignored", "--nocapture"])
            .env(CHILD_DIR, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let kept = out.lines().map(Result::unwrap).filter_map(|l| l.strip_prefix("kept ").map(str::to_owned));
        let last = kept.take(4 + 3 * round).last().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(reasons(dir.path()).iter().any(|reason| *reason == format!("entry {last}")), "round {round}");
        written(dir.path(), SMALL, 1).await;
        assert_eq!(verify(dir.path()).broken, None, "round {round}");
    }
}
