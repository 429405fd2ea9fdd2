//! Ways to leave a test without testing anything. `mvm_needs::can_run` is the only one that is allowed.

use crate::sources::Source;

/// The one place that decides.
const DECIDES: &str = "tests/needs/src/lib.rs";

/// Tests that look at their own user for another reason than to leave.
const LOOKS_AT_ITS_USER: [(&str, &str); 3] = [
    ("tests/src/stand_in/jailer.rs", "plays the jailer, which does less for a user"),
    ("tests/it/firecracker/jailed.rs", "gives a jail to a user of its own, or to itself"),
    ("host/tests/it/sandbox.rs", "gives run directories away where it can"),
];

impl Source {
    /// The lines where a test decides by itself that it does not run, with what is wrong.
    pub(crate) fn left_tests(&self) -> Vec<(usize, &'static str)> {
        if self.name == DECIDES {
            return Vec::new();
        }
        // Put together here, so that this file does not break its own rule.
        let (ci, said) = ("\"C\u{49}\"", ["did n\u{6f}t run", "N\u{4f}T RUN", "ski\u{70}ped:"]);
        let looks_at_user = LOOKS_AT_ITS_USER.iter().any(|(name, _)| *name == self.name);
        let begin = self.tests_from();
        let mut found = Vec::new();
        let (mut attributes, mut test, mut before) = (String::new(), None, "");
        for (line, text) in self.lines() {
            let (code, indent) = (text.trim(), text.len() - text.trim_start().len());
            if code.starts_with("#[") {
                attributes.push_str(code);
            } else if is_function(code) {
                let is_test = ["#[test]", "#[tokio::test"].iter().any(|mark| attributes.contains(mark));
                // What another test starts as its child returns when its part is done.
                test = (is_test && !attributes.contains("child")).then_some(indent);
                attributes.clear();
            }
            if line >= begin {
                let asked = [before, code].iter().any(|guard| guard.contains("can_run("));
                let early = test.is_some_and(|function| leaves(code, indent, function));
                let is_said = said.iter().any(|word| code.contains(word)) && code.contains('"');
                let faults = [
                    (code.contains(ci), "reads CI"),
                    (code.contains(".is_ro\u{6f}t()") && !looks_at_user, "looks at its user"),
                    (is_said, "says that it does not run"),
                    (early && !asked, "returns early"),
                ];
                found.extend(faults.into_iter().filter(|(fault, _)| *fault).map(|(_, why)| (line, why)));
            }
            if !code.is_empty() {
                before = code;
            }
        }
        found
    }
}

fn is_function(code: &str) -> bool {
    let mut words = code.split_whitespace().skip_while(|word| word.starts_with("pub") || *word == "async");
    words.next() == Some("fn")
}

/// Whether the line ends the whole test: not a closure, nor a loop that found what it looked for.
fn leaves(code: &str, indent: usize, function: usize) -> bool {
    let at_the_top = indent == function + 4;
    let inside_a_condition = indent == function + 8;
    let says_and_returns = code.starts_with("return println!") || code.starts_with("return eprintln!");
    says_and_returns
        || (at_the_top && code.contains("else { return }"))
        || ((at_the_top || inside_a_condition) && matches!(code, "return;" | "return Ok(());"))
}

#[test]
fn every_way_to_leave_a_test_early_is_seen() {
    let seen = |body: &str| {
        let text = format!("#[test]\nfn a_test() {{\n{body}\n}}\n");
        let source = Source { name: "tests/some.rs".to_owned(), text };
        source.left_tests().into_iter().map(|(_, why)| why).collect::<Vec<_>>()
    };
    assert_eq!(seen("    if !can_run(&[Need::Root]) {\n        return;\n    }"), [""; 0]);
    assert_eq!(seen("    let Some(a) = a_where_it_can_run() else { return };"), [""; 0]);
    assert_eq!(seen("    let look = || {\n            return;\n    };"), [""; 0]);
    assert_eq!(seen("    let Some(a) = a() else { retur\u{6e} };"), ["returns early"]);
    assert_eq!(seen("    if !path.exists() {\n        return;\n    }"), ["returns early"]);
    assert_eq!(
        seen("    if !a() {\n        eprintln!(\"ski\u{70}ped: no a\");\n        return;\n    }").len(),
        2
    );
    assert_eq!(seen("            Err(_) => {\n            return println!(\"no\");"), ["returns early"]);
    assert_eq!(
        seen("    if geteuid().is_ro\u{6f}t() {\n        assert!(a());\n    }"),
        ["looks at its user"]
    );
    assert_eq!(seen("    assert!(var_os(\"C\u{49}\").is_none());"), ["reads CI"]);
}
