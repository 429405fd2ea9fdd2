//! Whether an SPDX licence expression can be met with licences from a list.

/// `true` when the expression is met: one side of every OR, both sides of every AND. The old `MIT/Apache-2.0` is an OR.
pub(crate) fn allows(expression: &str, list: &[String]) -> Result<bool, String> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<_> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    let met = any(&mut rest, list)?;
    if rest.is_empty() { Ok(met) } else { Err(format!("`{expression}` is not understood")) }
}

fn any(rest: &mut &[&str], list: &[String]) -> Result<bool, String> {
    let mut met = all(rest, list)?;
    while take(rest, "OR") {
        met |= all(rest, list)?;
    }
    Ok(met)
}

fn all(rest: &mut &[&str], list: &[String]) -> Result<bool, String> {
    let mut met = one(rest, list)?;
    while take(rest, "AND") {
        met &= one(rest, list)?;
    }
    Ok(met)
}

fn one(rest: &mut &[&str], list: &[String]) -> Result<bool, String> {
    if take(rest, "(") {
        let met = any(rest, list)?;
        return if take(rest, ")") { Ok(met) } else { Err("a parenthesis is not closed".to_owned()) };
    }
    let (&name, after) = rest.split_first().ok_or("the expression ends too early")?;
    *rest = after;
    let mut name = name.to_owned();
    if take(rest, "WITH") {
        let (&exception, after) = rest.split_first().ok_or("WITH needs an exception")?;
        *rest = after;
        name = format!("{name} WITH {exception}");
    }
    Ok(list.contains(&name))
}

fn take(rest: &mut &[&str], word: &str) -> bool {
    match rest.split_first() {
        Some((first, after)) if *first == word => {
            *rest = after;
            true
        }
        _ => false,
    }
}

#[test]
fn an_expression_is_met_by_one_side_of_an_or_and_both_of_an_and() {
    let list = ["MIT".to_owned(), "ISC".to_owned(), "Apache-2.0 WITH LLVM-exception".to_owned()];
    for (expression, met) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0/MIT", true),
        ("GPL-3.0 AND MIT", false),
        ("ISC AND (GPL-3.0 OR MIT)", true),
        ("(ISC OR GPL-3.0) AND GPL-2.0", false),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("Apache-2.0", false),
    ] {
        assert_eq!(allows(expression, &list), Ok(met), "{expression}");
    }
    assert!(allows("(MIT", &list).is_err());
    assert!(allows("", &list).is_err());
}
