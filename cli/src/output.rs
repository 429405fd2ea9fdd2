//! Everything that is written to standard output and standard error, in the form the user asked for.
//!
//! Nodes, guests and coordinators choose much of the text. This is the only file that writes to the two streams
//! (`tests/tidy.rs` holds that), and each way to write here escapes what a terminal would act on: cells of a [`Table`]
//! and lines stay on one line, JSON and YAML are escaped by their own rules. Bytes go out as they are in three cases:
//! what a command inside an instance printed, an archive, and a console that is piped or asked for with `--raw`.

use std::io::{IsTerminal, Write};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use clap::ValueEnum;
use comfy_table::{ContentArrangement, presets};
use mvm_proto::Timestamp;
use mvm_proto::text;
use serde::Serialize;

/// More than any name, reason or reference that a person reads.
const MAX_LINE_BYTES: usize = 4096;
/// An error lists all mistakes of a document, or the end of a build's output.
const MAX_ERROR_BYTES: usize = 256 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Columns for people
    Table,
    /// More columns for people
    Wide,
    Json,
    Yaml,
    /// The names of objects, a line each
    Name,
}

/// Whether a person reads what is printed in this format.
pub(crate) fn is_for_people(format: Format) -> bool {
    matches!(format, Format::Table | Format::Wide)
}

/// Columns. Each cell is one line, whatever it was made of.
#[derive(Debug, Default)]
pub(crate) struct Table {
    headings: Option<Vec<String>>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn set_header<T: AsRef<str>>(&mut self, headings: impl IntoIterator<Item = T>) {
        self.headings = Some(headings.into_iter().map(cell).collect());
    }

    pub(crate) fn add_row<T: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(cell).collect());
    }

    /// The cells of its rows.
    pub(crate) fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Takes the columns away in which no row has anything.
    pub(crate) fn drop_empty(&mut self, headings: &[&str]) {
        let Some(all) = &mut self.headings else { return };
        for heading in headings {
            let Some(column) = all.iter().position(|it| it == heading) else { continue };
            let is_empty = |row: &Vec<String>| row.get(column).is_none_or(|cell| cell == "-");
            if self.rows.iter().all(is_empty) {
                all.remove(column);
                self.rows
                    .iter_mut()
                    .filter(|row| column < row.len())
                    .for_each(|row| drop(row.remove(column)));
            }
        }
    }

    /// As it is on paper, however wide.
    #[cfg(test)]
    pub(crate) fn render(&self) -> String {
        self.rendered(None)
    }

    /// With the longest cells of a list cut until its lines fit `width`.
    fn rendered(&self, width: Option<usize>) -> String {
        let most = self.most(width);
        let cut = |row: &[String]| -> Vec<String> {
            row.iter().zip(&most).map(|(cell, most)| cut(cell, *most)).collect()
        };
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        if let Some(headings) = &self.headings {
            table.set_header(cut(headings));
        }
        for row in &self.rows {
            table.add_row(cut(row));
        }
        // The style pads every cell with a blank; the first one would indent everything.
        let text = table.to_string();
        let trimmed = |line: &str| line.strip_prefix(' ').unwrap_or(line).trim_end().to_owned() + "\n";
        text.lines().map(trimmed).collect()
    }

    /// How long the cells of each column may be: the widest columns give way until the rest fits.
    fn most(&self, width: Option<usize>) -> Vec<usize> {
        let rows = || self.headings.iter().chain(&self.rows);
        let columns = rows().map(Vec::len).max().unwrap_or_default();
        let longest = |column: usize| {
            rows().filter_map(|row| Some(row.get(column)?.chars().count())).max().unwrap_or(0)
        };
        let mut most: Vec<usize> = (0..columns).map(longest).collect();
        // Properties are read one by one, and nothing stands to the right of them.
        let Some(width) = width.filter(|_| self.headings.is_some()) else { return most };
        loop {
            let excess = (most.iter().sum::<usize>() + BETWEEN_COLUMNS * columns).saturating_sub(width);
            let Some(widest) = most.iter_mut().max().filter(|widest| excess > 0 && **widest > MIN_CELL)
            else {
                return most;
            };
            *widest = widest.saturating_sub(excess.min(CUT_AT_ONCE)).max(MIN_CELL);
        }
    }
}

/// Blanks between two columns.
const BETWEEN_COLUMNS: usize = 2;
/// A cell is not cut below this, however narrow the terminal: it would say nothing.
const MIN_CELL: usize = 12;
/// Little enough that of two wide columns both give way.
const CUT_AT_ONCE: usize = 4;

fn cut(cell: &str, most: usize) -> String {
    if cell.chars().count() <= most {
        return cell.to_owned();
    }
    cell.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// Of the terminal that standard output is; none for a file or a program.
fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Rows and columns of the terminal that standard output is, or else standard input; none where neither is one.
pub(crate) fn terminal_size() -> Option<(u16, u16)> {
    use rustix::termios::tcgetwinsize;
    let size = tcgetwinsize(std::io::stdout()).or_else(|_| tcgetwinsize(std::io::stdin())).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

fn cell(text: impl AsRef<str>) -> String {
    text::one_line(text.as_ref(), MAX_LINE_BYTES)
}

/// Prints `value` for programs, or `table(wide)` for people.
pub(crate) fn show<T: Serialize>(
    format: Format,
    value: &T,
    table: impl FnOnce(bool) -> Table,
) -> anyhow::Result<()> {
    write(rendered(format, value, table)?.as_bytes())
}

/// Prints `value` for programs, or tables for people, each after a blank line, without those that have no rows.
pub(crate) fn show_all<T: Serialize>(
    format: Format,
    value: &T,
    tables: impl FnOnce(bool) -> Vec<Table>,
) -> anyhow::Result<()> {
    let text = match format {
        Format::Table => joined(&tables(false), terminal_width()),
        Format::Wide => joined(&tables(true), None),
        format => rendered(format, value, |_| plain())?,
    };
    write(text.as_bytes())
}

fn joined(tables: &[Table], width: Option<usize>) -> String {
    let shown = tables.iter().filter(|table| !table.rows.is_empty()).map(|table| table.rendered(width));
    shown.collect::<Vec<_>>().join("\n")
}

/// A value as YAML that a terminal only shows: to read, to edit, to compare.
pub(crate) fn yaml<T: Serialize>(value: &T) -> anyhow::Result<String> {
    rendered(Format::Yaml, value, |_| plain())
}

/// Tables that are drawn again over what they were, where standard output is a terminal.
#[derive(Debug)]
pub(crate) struct Screen {
    /// Of what is drawn now.
    lines: usize,
}

impl Screen {
    /// None where standard output is a file or a program.
    pub(crate) fn of_terminal() -> Option<Self> {
        std::io::stdout().is_terminal().then_some(Self { lines: 0 })
    }

    pub(crate) fn draw(&mut self, tables: &[Table]) -> anyhow::Result<()> {
        let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
        let rows = size.map(|size| usize::from(size.ws_row)).filter(|rows| *rows > 1);
        let text = fitting(&joined(tables, terminal_width()), rows);
        let back = redraw(self.lines);
        self.lines = text.lines().count();
        write(format!("{back}{text}").as_bytes())
    }
}

/// Back to the first of the lines, and nothing below.
fn redraw(lines: usize) -> String {
    match lines {
        0 => String::new(),
        lines => format!("\x1b[{lines}A\r\x1b[J"),
    }
}

/// The first lines that a terminal of so many rows shows together with its cursor; then how many there are more.
fn fitting(text: &str, rows: Option<usize>) -> String {
    let (all, most) = (text.lines().count(), rows.unwrap_or(usize::MAX) - 1);
    if all <= most {
        return text.to_owned();
    }
    let shown = text.lines().take(most - 1).map(|line| format!("{line}\n")).collect::<String>();
    format!("{shown}... {} more\n", all - (most - 1))
}

fn rendered<T: Serialize>(
    format: Format,
    value: &T,
    table: impl FnOnce(bool) -> Table,
) -> anyhow::Result<String> {
    match format {
        Format::Table => Ok(table(false).rendered(terminal_width())),
        Format::Wide => Ok(table(true).rendered(None)),
        Format::Name => Err(anyhow::anyhow!("-o name is for declared objects: get, apply, delete")),
        Format::Json => Ok(text::json(&json(value)?)),
        Format::Yaml => {
            let written = serde_yaml_ng::to_string(value).context("could not write the result as YAML")?;
            // YAML escapes in some kinds of strings only. JSON is YAML too, and escapes in all of them.
            let safe = written.chars().all(|c| text::is_printable(c) || c == '\n');
            if safe { Ok(written) } else { Ok(text::json_as_yaml(&json(value)?)) }
        }
    }
}

fn json<T: Serialize>(value: &T) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value).context("could not write the result as JSON")? + "\n")
}

/// One line of a stream: `value` for programs, or `parts` for people.
pub(crate) fn show_line<T: Serialize>(
    format: Format,
    value: &T,
    parts: impl IntoIterator<Item: AsRef<str>>,
) -> anyhow::Result<()> {
    write(rendered_line(format, value, parts)?.as_bytes())
}

fn rendered_line<T: Serialize>(
    format: Format,
    value: &T,
    parts: impl IntoIterator<Item: AsRef<str>>,
) -> anyhow::Result<String> {
    if format == Format::Json {
        let written = serde_json::to_string(value).context("could not write a line as JSON")?;
        return Ok(text::json(&written) + "\n");
    }
    Ok(parts.into_iter().map(cell).collect::<Vec<_>>().join("  ") + "\n")
}

/// What this program made of itself alone, on any number of lines: a schema, a script.
pub(crate) fn print(own: &str) -> anyhow::Result<()> {
    write(text::lines(own, usize::MAX).as_bytes())
}

/// A guest's console: as it is for a file or a program, escaped for a terminal.
pub(crate) fn console(bytes: &[u8], as_it_is: bool) -> anyhow::Result<()> {
    write(&shown_console(bytes, std::io::stdout().is_terminal() && !as_it_is))
}

fn shown_console(bytes: &[u8], escape: bool) -> Vec<u8> {
    if escape {
        text::lines(&String::from_utf8_lossy(bytes), usize::MAX).into_bytes()
    } else {
        bytes.to_vec()
    }
}

/// What a command inside an instance printed, as if it had run here.
pub(crate) fn of_command(bytes: &[u8]) -> anyhow::Result<()> {
    write(bytes)
}

/// The same for its standard error.
pub(crate) fn error_of_command(bytes: &[u8]) {
    write_error(bytes);
}

/// Where an archive goes that no file was named for.
pub(crate) fn archive() -> impl Write {
    std::io::stdout().lock()
}

/// A reader that went away (`mvm ... | head`) is not an error.
fn write(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("could not write the result")
        }
        _ => Ok(()),
    }
}

/// A standard error that is closed can't be told about.
fn write_error(bytes: &[u8]) {
    let _ = std::io::stderr().lock().write_all(bytes);
}

/// One line on standard error.
pub(crate) fn say(line: &str) {
    // A raw terminal goes down a line and stays in its column.
    let end = if crate::terminal::is_raw() { "\r\n" } else { "\n" };
    write_error(format!("{}{end}", cell(line)).as_bytes());
}

/// What made a command fail. A line of it that is not the first is indented: no text in it can pass for another line
/// of this program.
pub(crate) fn error(text: &str) {
    let (on, off) = if has_color() { ("\x1b[1;31m", "\x1b[0m") } else { ("", "") };
    write_error(format!("{on}error:{off} {}\n", shown_error(text)).as_bytes());
}

fn shown_error(text: &str) -> String {
    let text = text::lines(text, MAX_ERROR_BYTES);
    let mut lines = text.lines();
    let mut shown = lines.next().unwrap_or_default().to_owned();
    for line in lines {
        shown.push_str(if line.starts_with("  ") { "\n" } else { "\n  " });
        shown.push_str(line);
    }
    shown
}

/// Whether standard error is a terminal whose user wants colours.
pub(crate) fn has_color() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Where log lines go, which `logging` has escaped.
pub(crate) fn log() -> impl Write {
    std::io::stderr()
}

/// Columns and nothing else.
pub(crate) fn plain() -> Table {
    Table::default()
}

/// A table without lines, with upper-case headings, as `kubectl` and `nomad` print them.
pub(crate) fn table<const N: usize>(headings: [&str; N]) -> Table {
    let mut table = plain();
    table.set_header(headings);
    table
}

/// Two columns: name and value.
pub(crate) fn properties<'a>(rows: impl IntoIterator<Item = (&'a str, String)>) -> Table {
    let mut table = plain();
    for (name, value) in rows {
        table.add_row([name, &value]);
    }
    table
}

/// What stands where nothing is known.
pub(crate) fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

/// When something was or will be: how long ago or in how long, or to the letter.
pub(crate) fn when(at: &str, to_the_letter: bool) -> String {
    match at.parse::<Timestamp>() {
        Ok(at) if !to_the_letter => distance(Timestamp::from(SystemTime::now()), at),
        _ => or_dash(at),
    }
}

/// Both, where there is room for both.
pub(crate) fn when_exactly(at: &str) -> String {
    match at.parse::<Timestamp>() {
        Ok(time) => format!("{at} ({})", distance(Timestamp::from(SystemTime::now()), time)),
        Err(_) => or_dash(at),
    }
}

fn distance(now: Timestamp, at: Timestamp) -> String {
    if at > now { format!("in {}", span(at.since(now))) } else { format!("{} ago", span(now.since(at))) }
}

/// In the largest unit of which there are at least two, rounded down.
pub(crate) fn span(span: Duration) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    match span.as_secs() {
        seconds if seconds < 2 * MINUTE => format!("{seconds}s"),
        seconds if seconds < 2 * HOUR => format!("{}m", seconds / MINUTE),
        seconds if seconds < 2 * DAY => format!("{}h", seconds / HOUR),
        seconds => format!("{}d", seconds / DAY),
    }
}

/// A size with one decimal, in the largest unit of which there is one; in MiB when it is smaller.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 3] = ["MiB", "GiB", "TiB"];
    // Exact far beyond what any machine has.
    let mut amount = bytes as f64 / (1024.0 * 1024.0);
    let mut unit = 0;
    // What would be shown as 1024.0 is one of the next.
    while amount >= 1023.95 && unit + 1 < UNITS.len() {
        amount /= 1024.0;
        unit += 1;
    }
    format!("{amount:.1} {}", UNITS[unit])
}

/// The same of MiB.
pub(crate) fn mib(mib: u64) -> String {
    bytes(mib.saturating_mul(1024 * 1024))
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
