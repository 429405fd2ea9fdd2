//! Results on standard output, in the form the user asked for.

use std::io::Write;

use anyhow::Context;
use clap::ValueEnum;
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Columns for people
    Table,
    /// More columns for people
    Wide,
    Json,
    Yaml,
}

/// Prints `value` for programs, or `table(wide)` for people.
pub(crate) fn show<T: Serialize>(
    format: Format,
    value: &T,
    table: impl FnOnce(bool) -> Table,
) -> anyhow::Result<()> {
    let text = match format {
        Format::Table | Format::Wide => {
            let text = table(format == Format::Wide).to_string();
            // The style pads every cell with a blank; the first one would indent everything.
            text.lines()
                .map(|line| line.strip_prefix(' ').unwrap_or(line).trim_end().to_owned() + "\n")
                .collect()
        }
        Format::Json => {
            serde_json::to_string_pretty(value).context("could not write the result as JSON")? + "\n"
        }
        Format::Yaml => serde_yaml_ng::to_string(value).context("could not write the result as YAML")?,
    };
    print(&text)
}

/// Writes to standard output; a reader that went away (`mvm ... | head`) is not an error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    print_bytes(text.as_bytes())
}

/// The same for what need not be text.
pub(crate) fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("could not write the result")
        }
        _ => Ok(()),
    }
}

/// Columns and nothing else.
pub(crate) fn plain() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table
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
        table.add_row([name.to_owned(), value]);
    }
    table
}

/// What stands where nothing is known.
pub(crate) fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}
