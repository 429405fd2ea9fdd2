//! Ways in which a test lets time pass instead of waiting for something, also those that do not look like a sleep.

use crate::sources::Source;

/// Files in which time must pass, each with its reason.
const TIME_PASSES: [(&str, &str); 2] = [
    ("tests/it/hostile_peers/site.rs", "what an attack costs the processor is measured over a span of time"),
    ("tests/src/stand_in/machine.rs", "plays a VMM that flushes its metrics every so often"),
];

/// What lets time pass by itself.
const SLEEPS: [&str; 4] = ["thread::sleep(", "time::sleep(", "sleep_until(", "park_timeout("];
/// What waits for a condition, which must not be that time has passed.
const WAITS: [&str; 4] = ["wait_until(", "wait_for(", "wait_for_or(", "wait_closely("];
/// How a test says that a time limit must be reached.
const REACHED: [&str; 3] = ["is_err()", "unwrap_err()", "expect_err("];

impl Source {
    /// The lines on which a test lets time pass, with how. Polling in a function that is called `wait_...` is how waiting
    /// is done, and time that is paused does not pass.
    pub(crate) fn pauses(&self) -> Vec<(usize, &'static str)> {
        let begin = self.tests_from();
        if TIME_PASSES.iter().any(|(name, _)| *name == self.name) || begin == usize::MAX {
            return Vec::new();
        }
        let lines: Vec<_> = self.lines().collect();
        let file_pauses = self.text.contains("start_paused");
        let (mut function, mut attribute, mut next, mut paused_since) = ("", "", "", false);
        let mut found = Vec::new();
        for (index, &(line, text)) in lines.iter().enumerate() {
            let code = text.trim();
            if code.starts_with("#[tokio::test") || code.starts_with("#[test]") {
                next = code;
            }
            if code.contains("fn ") && code.contains('(') && !code.starts_with('"') {
                (function, attribute, paused_since) = (code, std::mem::take(&mut next), false);
            }
            paused_since =
                (paused_since || code.contains("time::pause()")) && !code.contains("time::resume()");
            // Helpers are called by the file's tests; a test says for itself whether its time is paused.
            let paused =
                paused_since || file_pauses && (attribute.is_empty() || attribute.contains("start_paused"));
            if line < begin || paused || function.contains("fn wait_") {
                continue;
            }
            let before = index.checked_sub(1).map_or("", |index| lines[index].1.trim());
            let after = lines[index + 1..].iter().take(3).map(|(_, text)| text.trim()).collect::<Vec<_>>();
            found.extend(pause(before, code, &after.join(" ")).map(|why| (line, why)));
        }
        found
    }
}

/// How a line lets time pass, with the line before and the lines after.
fn pause(before: &str, code: &str, after: &str) -> Option<&'static str> {
    let has = |words: &[&str]| words.iter().any(|word| code.contains(word));
    if has(&SLEEPS) {
        return Some("sleeps");
    }
    if code.contains("Command::new(\"sleep\")") && !code.contains("\"infinity\"") {
        return Some("sleeps in another process");
    }
    if has(&WAITS) && has(&["Instant::now()", ".elapsed()"]) {
        return Some("waits for the clock");
    }
    let (_, limited) = code.split_once("timeout(")?;
    // What came of it is kept in a variable, named on this line or on the one before, or is looked at here.
    let kept = limited.ends_with(".await;") || limited.ends_with(");");
    let name =
        [code, before].into_iter().find_map(|line| Some(line.strip_prefix("let ")?.split_once(" =")?.0));
    let is_reached = |how: &&str| {
        let here = [".await.", ")."].iter().any(|then| limited.contains(&format!("{then}{how}")));
        here || kept && name.is_some_and(|name| after.contains(&format!("{name}.{how}")))
    };
    let reached = REACHED.iter().any(is_reached) || limited.contains("pending");
    reached.then_some("waits for a time limit to be reached")
}

#[test]
fn every_kind_of_pause_is_seen() {
    let seen = |attribute: &str, function: &str, body: &str| {
        let text = format!("{attribute}\nasync fn {function}() {{\n{body}\n}}\n");
        let source = Source { name: "some/tests/it.rs".to_owned(), text };
        source.pauses().into_iter().map(|(_, why)| why).collect::<Vec<_>>()
    };
    let in_test = |body: &str| seen("#[tokio::test]", "a_test", body);
    let bodies = [
        ("    std::thread::sle\u{65}p(SOON);", "sleeps"),
        ("    tokio::time::sle\u{65}p(SOON).await;", "sleeps"),
        ("    std::thread::par\u{6b}_timeout(SOON);", "sleeps"),
        ("    Command::new(\"sle\u{65}p\").arg(\"1\").status();", "sleeps in another process"),
        ("    wai\u{74}_until(\"then\", || Instant::now() >= then);", "waits for the clock"),
        (
            "    let quiet = timeou\u{74}(SOON, it.recv()).await;\n    assert!(quiet.is_err());",
            "waits for a time limit to be reached",
        ),
        ("    let _ = timeou\u{74}(SOON, pending::<()>()).await;", "waits for a time limit to be reached"),
        ("    assert!(news.recv_timeou\u{74}(SOON).is_err());", "waits for a time limit to be reached"),
    ];
    for (body, why) in bodies {
        assert_eq!(in_test(body), [why], "{body}");
        assert_eq!(seen("#[tokio::test(start_paused = true)]", "a_test", body), [""; 0], "{body}");
    }
    assert_eq!(in_test("    tokio::time::pause();\n    tokio::time::sle\u{65}p(LONG).await;"), [""; 0]);
    assert_eq!(seen("", "wait_until", "    std::thread::sle\u{65}p(SOON);"), [""; 0]);
    assert_eq!(in_test("    timeou\u{74}(PATIENCE, it.recv()).await.unwrap();"), [""; 0]);
    assert_eq!(in_test("    Command::new(\"sle\u{65}p\").arg(\"infinity\").spawn();"), [""; 0]);
}
