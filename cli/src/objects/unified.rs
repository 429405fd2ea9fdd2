//! The unified diff of two texts.

/// Unchanged lines before and after a change.
const CONTEXT: usize = 3;
/// Beyond this many pairs of lines, what differs is told as replaced as a whole.
const MAX_PAIRS: usize = 4_000_000;

/// One line of an edit script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line<'a> {
    Same(&'a str),
    Old(&'a str),
    New(&'a str),
}

/// `--- OLD`, `+++ NEW`, then hunks; empty when the texts are the same.
pub(crate) fn unified(old_name: &str, old: &str, new_name: &str, new: &str) -> String {
    let (old, new): (Vec<_>, Vec<_>) = (old.lines().collect(), new.lines().collect());
    let script = script(&old, &new);
    let changed: Vec<usize> =
        (0..script.len()).filter(|index| !matches!(script[*index], Line::Same(_))).collect();
    let Some(first) = changed.first() else { return String::new() };
    let mut hunks: Vec<(usize, usize)> = vec![(*first, *first)];
    for index in changed {
        match hunks.last_mut() {
            Some((_, end)) if index - *end <= 2 * CONTEXT + 1 => *end = index,
            _ => hunks.push((index, index)),
        }
    }
    let mut text = format!("--- {old_name}\n+++ {new_name}\n");
    for (begin, end) in hunks {
        let (begin, end) = (begin.saturating_sub(CONTEXT), (end + CONTEXT + 1).min(script.len()));
        let count = |lines: &[Line<'_>], other: fn(&Line<'_>) -> bool| {
            lines.iter().filter(|line| matches!(line, Line::Same(_)) || other(line)).count()
        };
        let is_old = |line: &Line<'_>| matches!(line, Line::Old(_));
        let is_new = |line: &Line<'_>| matches!(line, Line::New(_));
        let range = |is: fn(&Line<'_>) -> bool| {
            let (before, length) = (count(&script[..begin], is), count(&script[begin..end], is));
            format!("{},{length}", before + usize::from(length > 0))
        };
        text += &format!("@@ -{} +{} @@\n", range(is_old), range(is_new));
        for line in &script[begin..end] {
            let (mark, line) = match line {
                Line::Same(line) => (' ', line),
                Line::Old(line) => ('-', line),
                Line::New(line) => ('+', line),
            };
            text += &format!("{mark}{line}\n");
        }
    }
    text
}

/// The shortest script between the lines, by their longest common subsequence.
fn script<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<Line<'a>> {
    let same = |a: &[&str], b: &[&str]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let head = same(old, new);
    let (old_rest, new_rest) = (&old[head..], &new[head..]);
    let tail = old_rest.iter().rev().zip(new_rest.iter().rev()).take_while(|(a, b)| a == b).count();
    let (old_middle, new_middle) = (&old_rest[..old_rest.len() - tail], &new_rest[..new_rest.len() - tail]);
    let mut lines: Vec<_> = old[..head].iter().map(|line| Line::Same(line)).collect();
    if old_middle.len().saturating_mul(new_middle.len()) > MAX_PAIRS {
        lines.extend(old_middle.iter().map(|line| Line::Old(line)));
        lines.extend(new_middle.iter().map(|line| Line::New(line)));
    } else {
        lines.extend(by_subsequence(old_middle, new_middle));
    }
    lines.extend(old[old.len() - tail..].iter().map(|line| Line::Same(line)));
    lines
}

fn by_subsequence<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<Line<'a>> {
    let columns = new.len() + 1;
    // How long the common subsequence of what follows is.
    let mut longest = vec![0u32; (old.len() + 1) * columns];
    for i in (0..old.len()).rev() {
        for j in (0..new.len()).rev() {
            longest[i * columns + j] = if old[i] == new[j] {
                longest[(i + 1) * columns + j + 1] + 1
            } else {
                longest[(i + 1) * columns + j].max(longest[i * columns + j + 1])
            };
        }
    }
    let (mut i, mut j, mut lines) = (0, 0, Vec::new());
    while i < old.len() || j < new.len() {
        if i < old.len() && j < new.len() && old[i] == new[j] {
            lines.push(Line::Same(old[i]));
            (i, j) = (i + 1, j + 1);
        } else if j == new.len()
            || i < old.len() && longest[(i + 1) * columns + j] >= longest[i * columns + j + 1]
        {
            lines.push(Line::Old(old[i]));
            i += 1;
        } else {
            lines.push(Line::New(new[j]));
            j += 1;
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diff(old: &str, new: &str) -> String {
        unified("a", old, "b", new)
    }

    #[test]
    fn equal_texts_have_none() {
        assert_eq!(diff("x\ny\n", "x\ny\n"), "");
        assert_eq!(diff("", ""), "");
    }

    #[test]
    fn changes_far_apart_are_hunks_of_their_own_with_three_lines_around() {
        let old: String = (1..=20).map(|n| format!("l{n}\n")).collect();
        let new = old.replace("l2\n", "two\n").replace("l18\n", "").replace("l20\n", "l20\nl21\n");
        let expected = "\
--- a
+++ b
@@ -1,5 +1,5 @@
 l1
-l2
+two
 l3
 l4
 l5
@@ -15,6 +15,6 @@
 l15
 l16
 l17
-l18
 l19
 l20
+l21
";
        assert_eq!(diff(&old, &new), expected);
    }

    #[test]
    fn something_from_nothing_and_back() {
        assert_eq!(diff("", "x\n"), "--- a\n+++ b\n@@ -0,0 +1,1 @@\n+x\n");
        assert_eq!(diff("x\n", ""), "--- a\n+++ b\n@@ -1,1 +0,0 @@\n-x\n");
    }

    #[test]
    fn a_text_of_thousands_of_other_lines_is_replaced_as_a_whole() {
        let many = |mark: &str| (0..3000).map(|n| format!("{mark}{n}\n")).collect::<String>();
        let shown = diff(&many("a"), &many("b"));
        assert_eq!(shown.lines().filter(|line| line.starts_with('+')).count(), 3001);
    }
}
