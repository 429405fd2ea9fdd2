//! What is and is not JSON to this reader.

use super::*;

const ROOM: usize = 64 * 1024 * 1024;

fn refused(text: impl AsRef<[u8]>) -> String {
    let errors = Json::parse(text.as_ref(), ROOM).expect_err("should be refused");
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_tree_keeps_the_order_of_its_text_and_borrows_what_is_not_escaped() {
    let text = br#"{"b":[1,-2,0.5,null,true],"a":"x\ny","c":"plain"}"#;
    let Json::Object(members) = Json::parse(text, ROOM).unwrap() else { panic!("not an object") };
    let numbers = [
        Json::Number(Number::Unsigned(1)),
        Json::Number(Number::Negative(-2)),
        Json::Number(Number::Float(0.5)),
        Json::Null,
        Json::Bool(true),
    ];
    assert_eq!(members[0], (Cow::Borrowed("b"), Json::Array(numbers.into())));
    assert_eq!(members[1].1, Json::Str("x\ny".into()));
    assert!(matches!(&members[2].1, Json::Str(Cow::Borrowed("plain"))));
}

#[test]
fn duplicate_keys_are_all_reported_with_their_paths_at_every_level() {
    let text = r#"{"a":1,"b":{"x":1,"y":2,"x":3},"a":[{"k":0,"\u006b":0}]}"#;
    let lines = "b.x: must appear once, found the key a second time\n\
                 a: must appear once, found the key a second time\n\
                 a[0].k: must appear once, found the key a second time";
    assert_eq!(refused(text), lines);
}

#[test]
fn a_duplicate_among_many_keys_is_found_without_comparing_each_with_each() {
    let keys: Vec<_> = (0..200_000).map(|n| format!(r#""k{n}":0"#)).collect();
    let text = format!("{{{}}}", keys.join(","));
    assert!(Json::parse(text.as_bytes(), ROOM).is_ok());
    let text = format!("{{{},\"k7\":0}}", keys.join(","));
    assert_eq!(refused(text), "k7: must appear once, found the key a second time");
}

#[test]
fn nesting_is_allowed_to_its_limit_and_no_deeper() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    assert!(Json::parse(nested(MAX_DEPTH).as_bytes(), ROOM).is_ok());
    let error = "document: must nest at most 32 levels deep, found more at line 1 column 3";
    assert!(refused(nested(MAX_DEPTH + 1)).starts_with(error));
    assert!(refused("[".repeat(10_000_000)).starts_with(error));
    assert!(refused("{\"a\":".repeat(1_000_000)).contains("32 levels"));
}

#[test]
fn the_limits_in_the_messages_are_the_limits() {
    assert_eq!(MAX_DEPTH, 32);
    assert_eq!(MAX_VALUES, 524_288);
}

#[test]
fn more_values_than_any_document_has_are_refused() {
    let text = format!("[{}0]", "0,".repeat(MAX_VALUES));
    assert!(refused(text).starts_with("document: must hold at most 524288 values"));
}

#[test]
fn a_text_over_the_size_limit_is_refused_unread() {
    let errors = Json::parse(b"not json at all", 8).unwrap_err();
    assert_eq!(errors[0].to_string(), "document: must be at most 8 bytes long, found 15 bytes");
}

#[test]
fn what_is_not_exactly_one_json_value_is_refused_with_a_reason() {
    let bytes: [(&[u8], &str); 14] = [
        (b"", "EOF while parsing"),
        (b"{} {}", "trailing characters"),
        (b"{}\0", "trailing characters"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"\xff\xfe{\0}\0", "must be UTF-8, found an invalid byte at offset 0"),
        (b"\"\xc0\xaf\"", "must be UTF-8, found an invalid byte at offset 1"),
        (br#""\ud800""#, "must be one JSON value"),
        (br#""\udc00\ud800""#, "must be one JSON value"),
        (b"\"a\nb\"", "control character"),
        (b"\"a\0b\"", "control character"),
        (b"[1,]", "trailing comma"),
        (b"{'a':1}", "must be one JSON value"),
        (b"NaN", "must be one JSON value"),
        (b"1e999", "number out of range"),
    ];
    for (text, reason) in bytes {
        let message = refused(text);
        assert!(message.contains(reason), "{text:?}: {message}");
    }
}

#[test]
fn numbers_keep_the_form_in_which_they_were_written() {
    let read = |text: &'static str| Json::parse(text.as_bytes(), ROOM).unwrap();
    assert_eq!(read("18446744073709551615"), Json::Number(Number::Unsigned(u64::MAX)));
    for fractional in ["1.0", "1e0", "-0", "18446744073709551616"] {
        assert!(matches!(read(fractional), Json::Number(Number::Float(_))), "{fractional}");
    }
}
