//! Everything that is written to standard output and standard error, in the form the user asked for.
//!
//! Nodes, guests and coordinators choose much of the text. This is the only file that writes to the two streams
//! (`tests/tidy.rs` holds that), and each way to write here escapes what a terminal would act on: cells of a [`Table`]
//! and lines stay on one line, JSON and YAML are escaped by their own rules. Bytes go out as they are in three cases:
//! what a command inside an instance printed, an archive, and a console that is piped or asked for with `--raw`.

use std::io::{IsTerminal, Write};

use anyhow::Context;
use clap::ValueEnum;
use comfy_table::{ContentArrangement, presets};
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
}

/// Columns. Each cell is one line, whatever it was made of.
#[derive(Debug)]
pub(crate) struct Table(comfy_table::Table);

impl Table {
    pub(crate) fn set_header<T: AsRef<str>>(&mut self, headings: impl IntoIterator<Item = T>) {
        self.0.set_header(headings.into_iter().map(cell));
    }

    pub(crate) fn add_row<T: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.0.add_row(cells.into_iter().map(cell));
    }

    pub(crate) fn render(&self) -> String {
        // The style pads every cell with a blank; the first one would indent everything.
        let text = self.0.to_string();
        let trimmed = |line: &str| line.strip_prefix(' ').unwrap_or(line).trim_end().to_owned() + "\n";
        text.lines().map(trimmed).collect()
    }
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

fn rendered<T: Serialize>(
    format: Format,
    value: &T,
    table: impl FnOnce(bool) -> Table,
) -> anyhow::Result<String> {
    match format {
        Format::Table | Format::Wide => Ok(table(format == Format::Wide).render()),
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
pub(crate) fn show_line<T: Serialize, const N: usize>(
    format: Format,
    value: &T,
    parts: [&str; N],
) -> anyhow::Result<()> {
    write(rendered_line(format, value, parts)?.as_bytes())
}

fn rendered_line<T: Serialize, const N: usize>(
    format: Format,
    value: &T,
    parts: [&str; N],
) -> anyhow::Result<String> {
    if format == Format::Json {
        let written = serde_json::to_string(value).context("could not write a line as JSON")?;
        return Ok(text::json(&written) + "\n");
    }
    Ok(parts.map(cell).join("  ") + "\n")
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
    write_error(format!("{}\n", cell(line)).as_bytes());
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
    let mut table = comfy_table::Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    Table(table)
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

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
