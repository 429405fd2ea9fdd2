//! The table that people read.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::row::{Figure, Goal, Row, Unit, Verdict};

/// All rows; notes stand below, so that the table stays narrow.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["WHAT", "OURS", "P25..P75", "N", "BESIDE", "ITS FIGURE", "RATIO (95 %)", "GOAL", ""]);
    for row in rows {
        let dash = || "-".to_owned();
        table.add_row([
            row.name.clone(),
            row.ours.map_or_else(dash, |figure| figure_text(&figure)),
            row.spread.map_or_else(dash, |s| format!("{}..{}", digits(s.p25), digits(s.p75))),
            row.spread.map_or_else(dash, |s| s.samples.to_string()),
            row.peer.as_ref().map_or_else(dash, |peer| peer.name.clone()),
            row.peer.as_ref().map_or_else(dash, |peer| figure_text(&peer.figure)),
            row.ratio.map_or_else(dash, |r| format!("{:.2} ({:.2}..{:.2})", r.median, r.low, r.high)),
            row.goal.map_or_else(dash, |goal| goal_text(goal, row.ours)),
            verdict_text(row.verdict).to_owned(),
        ]);
    }
    for column in [1, 2, 3, 5, 6] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let notes = rows.iter().flat_map(|row| row.notes.iter().map(|note| format!("\n  {}: {note}", row.name)));
    format!("{table}{}", notes.collect::<String>())
}

fn figure_text(figure: &Figure) -> String {
    format!("{} {}", digits(figure.value), unit_text(figure.unit))
}

fn unit_text(unit: Unit) -> &'static str {
    match unit {
        Unit::PerSecond => "/s",
        Unit::Milliseconds => "ms",
        Unit::Microseconds => "us",
        Unit::Mebibytes => "MiB",
        Unit::Kibibytes => "KiB",
        Unit::PercentOfCore => "% core",
        Unit::Percent => "%",
        Unit::Times => "times",
    }
}

fn goal_text(goal: Goal, ours: Option<Figure>) -> String {
    match goal {
        Goal::FigureBelow(limit) => format!("< {limit} {}", ours.map_or("", |figure| unit_text(figure.unit))),
        Goal::RatioAtLeast(limit) => format!("ratio >= {limit}"),
        Goal::RatioAtMost(limit) => format!("ratio <= {limit}"),
    }
}

fn verdict_text(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Met => "met",
        Verdict::Missed => "MISSED",
        Verdict::Information => "",
        Verdict::Failed => "FAILED",
    }
}

/// Three significant digits or so: no more are repeatable.
fn digits(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Subject;

    #[test]
    fn the_table_shows_figure_peer_ratio_goal_and_verdict() {
        let row = Row::of(Subject::Handshakes, "handshakes", &[900.0, 1000.0, 1100.0], Unit::PerSecond)
            .beside("bare quinn", &[(1000.0, 1000.0)])
            .goal(Goal::RatioAtLeast(0.83))
            .note("pinned");
        let text = table(&[row]);
        for part in
            ["1000 /s", "950..1050", "bare quinn", "1.00 (1.00..1.00)", "ratio >= 0.83", "met", "pinned"]
        {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }
}
