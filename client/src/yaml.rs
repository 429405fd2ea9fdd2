//! YAML and JSON to trees, strictly: what JSON can't say is an error, and so is a key that appears twice.

use std::borrow::Cow;

use mvm_proto::FieldError;
use mvm_proto::json::{Json, Report};
use serde_yaml_ng::Deserializer;

/// The largest text, and the most text that its documents may come to once their aliases are followed.
pub const MAX_TEXT_BYTES: usize = 16 * 1024 * 1024;

const FORM: &str = "must be YAML with nothing in it that JSON lacks";
const BYTE_ORDER_MARK: char = '\u{feff}';

/// One document of a text.
#[derive(Debug)]
pub struct Tree<'a> {
    /// Counted from 1.
    pub number: usize,
    /// Duplicate keys and the like are in it beside the tree; without a tree the text ends here.
    pub errors: Vec<FieldError>,
    pub tree: Option<Json<'a>>,
}

/// The documents of a YAML text. Empty ones are left out, and count.
#[must_use]
pub fn documents(text: &str) -> Vec<Tree<'_>> {
    if let Some(error) = unfit(text) {
        return vec![Tree { number: 1, errors: vec![error], tree: None }];
    }
    let mut trees = Vec::new();
    let mut left = MAX_TEXT_BYTES;
    for (index, source) in Deserializer::from_str(text).enumerate() {
        let report = Report::default();
        let tree = Json::read_from(source, left, FORM, &report);
        left = tree.as_ref().map_or(0, |tree| left.saturating_sub(text_of(tree)));
        let (errors, is_broken) = (report.into_errors(), tree.is_none());
        if !errors.is_empty() || !matches!(tree, Some(Json::Null)) {
            trees.push(Tree { number: index + 1, errors, tree });
        }
        if is_broken {
            break;
        }
    }
    trees
}

/// The one document of a JSON text.
#[must_use]
pub fn json(text: &str) -> Tree<'_> {
    let report = Report::default();
    let tree = Json::read(text.as_bytes(), MAX_TEXT_BYTES, &report);
    Tree { number: 1, errors: report.into_errors(), tree }
}

/// JSON where the text is that, else YAML.
#[must_use]
pub fn either(text: &str) -> Vec<Tree<'_>> {
    if text.trim_start().starts_with(['{', '[']) {
        let tree = json(text);
        if tree.tree.is_some() {
            return vec![tree];
        }
    }
    documents(text)
}

fn unfit(text: &str) -> Option<FieldError> {
    if text.len() > MAX_TEXT_BYTES {
        let expected: &str = &format!("must be at most {MAX_TEXT_BYTES} bytes long");
        return Some(FieldError::from((expected, format!("{} bytes", text.len()).as_str())));
    }
    let marked = text.starts_with(BYTE_ORDER_MARK);
    marked.then(|| FieldError::from(("must not begin with a byte order mark", "bytes ef bb bf")))
}

fn text_of(tree: &Json<'_>) -> usize {
    match tree {
        Json::Str(text) => text.len(),
        Json::Array(items) => items.iter().map(text_of).sum(),
        Json::Object(members) => {
            members.iter().map(|(key, value): &(Cow<'_, str>, _)| key.len() + text_of(value)).sum()
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that is wrong, a line each.
    fn refused(text: &str) -> String {
        let trees = documents(text);
        let errors = trees.iter().flat_map(|tree| {
            tree.errors.iter().map(|error| format!("{}: {error}", tree.number)).collect::<Vec<_>>()
        });
        errors.collect::<Vec<_>>().join("\n")
    }

    fn shown(text: &str) -> Vec<(usize, String)> {
        let read = |tree: Tree<'_>| {
            assert!(tree.errors.is_empty(), "{:?}", tree.errors);
            (tree.number, serde_json::to_string(&tree.tree.unwrap()).unwrap())
        };
        documents(text).into_iter().map(read).collect()
    }

    #[test]
    fn documents_are_counted_and_empty_ones_left_out() {
        let text =
            "# nothing\n---\na: 1\n---\n---\n# only a comment\n---\n- x\n- {b: [true, null, -2, 1.5]}\n";
        let expected = [(2, r#"{"a":1}"#), (5, r#"["x",{"b":[true,null,-2,1.5]}]"#)];
        let found = shown(text);
        let numbers: Vec<_> = found.iter().map(|(_, json)| json.as_str()).collect();
        assert_eq!(numbers, expected.map(|(_, json)| json));
        assert!(found[0].0 < found[1].0, "{found:?}");
        assert_eq!(shown(""), []);
        assert_eq!(shown("---\n---\n"), []);
    }

    #[test]
    fn words_that_only_look_like_values_are_text() {
        let text = "a: yes\nb: 'true'\nc: 0o17\nd: 1_000\n2: k\ntrue: t\n\"e\": \"\\u00e9\\n\"\n";
        let (_, json) = shown(text).remove(0);
        assert_eq!(json, r#"{"a":"yes","b":"true","c":15,"d":"1_000","2":"k","true":"t","e":"é\n"}"#);
    }

    #[test]
    fn every_duplicate_key_of_every_document_is_told() {
        let text = "a: 1\nb: {x: 1, x: 2}\na: 2\n---\nok: 1\n---\n- {k: 0, \"k\": 1}\n";
        let lines = "1: b.x: must appear once, found the key a second time\n\
                     1: a: must appear once, found the key a second time\n\
                     3: [0].k: must appear once, found the key a second time";
        assert_eq!(refused(text), lines);
    }

    #[test]
    fn what_json_lacks_is_refused_by_name_and_place() {
        for (text, told) in [
            ("a: !secret x\n", "1: document: must have no tags, found a tag"),
            ("a: !!binary aGk=\n", ""),
            ("a: .nan\n", "1: document: must hold finite numbers only"),
            ("a: -.inf\n", "1: document: must hold finite numbers only"),
            ("? [a, b]\n: 1\n", "must be YAML with nothing in it that JSON lacks"),
            ("a:\n\tb: 1\n", "must be YAML"),
            ("\u{feff}a: 1\n", "must not begin with a byte order mark"),
            ("a: 99999999999999999999999\n", "must be YAML with nothing in it that JSON lacks"),
            ("a: [1\n", "must be YAML"),
            ("a: *b\n", "must be YAML"),
        ] {
            let errors = refused(text);
            assert!(errors.contains(told), "{text:?}: {errors:?}");
        }
        assert!(refused("a: 1\nb: !t 2\n").contains("line 2"), "{}", refused("a: 1\nb: !t 2\n"));
    }

    #[test]
    fn a_broken_document_ends_the_text_and_those_before_it_are_read() {
        let trees = documents("a: 1\n---\nb: [\n---\nc: 1\n");
        let told: Vec<_> = trees.iter().map(|tree| (tree.number, tree.tree.is_some())).collect();
        assert_eq!(told, [(1, true), (2, false)]);
    }

    #[test]
    fn aliases_are_followed_and_can_not_blow_a_text_up() {
        assert_eq!(shown("a: &x {k: v}\nb: *x\n")[0].1, r#"{"a":{"k":"v"},"b":{"k":"v"}}"#);
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
            text += &format!("a{level}: &a{level} [{aliases}]\n");
        }
        let told = refused(&text);
        assert!(told.contains("repetition limit") || told.contains("at most 524288 values"), "{told}");
        // Few values, each of much text.
        let long = "x".repeat(1024 * 1024);
        let text = format!("a: &a {long}\nb: [{}]\n", ["*a"; 64].join(", "));
        assert!(refused(&text).contains("must not hold more text"), "{}", refused(&text));
        // Over all documents of a text, too.
        let each = format!("a: &a {long}\nb: [{}]\n---\n", ["*a"; 6].join(", "));
        assert!(refused(&each.repeat(2)).is_empty());
        assert!(refused(&each.repeat(3)).starts_with("3: document: must not hold more text"));
    }

    #[test]
    fn nesting_has_the_limit_that_json_has() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(refused(&nested(32)), "");
        assert!(refused(&nested(33)).contains("must nest at most 32 levels deep"));
    }

    #[test]
    fn json_is_taken_as_such_where_it_is_meant() {
        let text = r#"{"a": "\ud83d\ude00", "b": [1]}"#;
        let trees = either(text);
        assert_eq!(serde_json::to_string(&trees[0].tree).unwrap(), r#"{"a":"😀","b":[1]}"#);
        assert_eq!(either("{a: 1}").len(), 1);
        assert!(!json("{a: 1}").errors.is_empty());
    }
}
