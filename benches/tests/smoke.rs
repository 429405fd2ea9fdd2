//! Every measurement still runs. Nothing here looks at a figure: a test machine is no place for that.

use mvm_benches::effort::Effort;
use mvm_benches::row::{Row, Subject, Verdict};
use mvm_benches::{rows, table};

fn measured(subjects: &[Subject]) -> Vec<Row> {
    let rows = rows::measure(subjects, Effort::quick(), |_| {});
    let text = table::table(&rows);
    for subject in subjects {
        assert!(rows.iter().any(|row| row.subject == *subject), "{subject:?} is missing in\n{text}");
    }
    assert!(rows.iter().all(|row| row.verdict != Verdict::Failed), "{text}");
    rows
}

#[test]
fn documents_and_handshakes_are_measured_beside_their_peers() {
    let rows = measured(&[Subject::Documents, Subject::Handshakes]);
    assert!(rows.iter().all(|row| row.ratio.is_some_and(|ratio| ratio.median > 0.0)), "{rows:?}");
}

#[test]
fn real_processes_are_measured() {
    measured(&[Subject::Push, Subject::Sessions, Subject::Fanout]);
}
