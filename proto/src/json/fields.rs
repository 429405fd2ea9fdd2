//! From a tree to typed values, without stopping at the first mistake.
//!
//! Every getter either gives a value or adds to the [`Report`] and gives `None`. A caller reads all the fields it
//! wants, runs its own checks on those that could be read, and only then combines them with `?`.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::{Json, Number, Path, Report};

/// A value and where it is.
#[derive(Debug, Clone, Copy)]
pub struct Node<'n, 'a> {
    value: &'n Json<'a>,
    path: Path<'n>,
    report: &'n Report,
}

/// The members of an object whose possible keys are known.
#[derive(Debug, Clone)]
pub struct Fields<'n, 'a> {
    members: &'n [(Cow<'a, str>, Json<'a>)],
    path: Path<'n>,
    report: &'n Report,
    /// Where the field after the last one that was asked for would be: programs write fields in the order in which they
    /// are read here.
    next: Cell<usize>,
}

impl<'n, 'a> Node<'n, 'a> {
    #[must_use]
    pub fn root(value: &'n Json<'a>, report: &'n Report) -> Self {
        Self { value, path: Path::ROOT, report }
    }

    #[must_use]
    pub fn path(&self) -> &Path<'n> {
        &self.path
    }

    /// Says what would have been right; what was found is the value itself.
    pub fn refuse<T>(&self, expected: impl fmt::Display) -> Option<T> {
        self.refuse_as(expected, self.value)
    }

    /// Says what would have been right, and what was found in other words.
    pub fn refuse_as<T>(&self, expected: impl fmt::Display, found: impl fmt::Display) -> Option<T> {
        self.report.add(&self.path, &expected, &found);
        None
    }

    /// An integer written as one: no fraction, no exponent, not in quotes.
    #[must_use]
    pub fn integer(&self, range: RangeInclusive<u64>) -> Option<u64> {
        match self.value {
            Json::Number(Number::Unsigned(value)) if range.contains(value) => Some(*value),
            Json::Number(Number::Unsigned(_) | Number::Negative(_)) => {
                self.refuse(format_args!("must be {}", within(&range)))
            }
            _ => self.refuse(format_args!("must be an integer, {}", within(&range))),
        }
    }

    /// As [`Node::integer`], for ranges inside 32 bits.
    #[must_use]
    pub fn integer32(&self, range: RangeInclusive<u32>) -> Option<u32> {
        let wide = u64::from(*range.start())..=u64::from(*range.end());
        self.integer(wide).and_then(|value| u32::try_from(value).ok())
    }

    #[must_use]
    pub fn boolean(&self) -> Option<bool> {
        match self.value {
            Json::Bool(value) => Some(*value),
            _ => self.refuse("must be true or false"),
        }
    }

    #[must_use]
    pub fn text(&self) -> Option<&'n str> {
        match self.value {
            Json::Str(text) => Some(text),
            _ => self.refuse("must be a string"),
        }
    }

    /// A string that is a `T`; its error says what it must be.
    #[must_use]
    pub fn parse<T: FromStr<Err: fmt::Display>>(&self) -> Option<T> {
        let Json::Str(text) = self.value else { return self.refuse("must be a string") };
        text.parse().or_else(|cause: T::Err| self.refuse(cause).ok_or(())).ok()
    }

    /// A string that is one of these.
    #[must_use]
    pub fn choice<T: Copy>(&self, choices: &[(&str, T)]) -> Option<T> {
        let chosen = match self.value {
            Json::Str(text) => choices.iter().find(|(name, _)| name == text),
            _ => None,
        };
        chosen.map(|(_, value)| *value).or_else(|| {
            let names: Vec<_> = choices.iter().map(|(name, _)| format!("`{name}`")).collect();
            self.refuse(format_args!("must be one of {}", names.join(", ")))
        })
    }

    #[must_use]
    pub fn items(&self) -> Option<impl ExactSizeIterator<Item = Node<'_, 'a>>> {
        match self.value {
            Json::Array(items) => Some(items.iter().enumerate().map(|(index, value)| Node {
                value,
                path: self.path.item(index),
                report: self.report,
            })),
            _ => self.refuse("must be an array"),
        }
    }

    /// The members of an object whose keys are the user's own.
    #[must_use]
    pub fn entries(&self) -> Option<impl ExactSizeIterator<Item = (&'n str, Node<'_, 'a>)>> {
        match self.value {
            Json::Object(members) => Some(members.iter().enumerate().map(|(place, (key, value))| {
                let path = self.path.field(key, place);
                (key.as_ref(), Node { value, path, report: self.report })
            })),
            _ => self.refuse("must be an object"),
        }
    }

    /// The value as it was written.
    #[must_use]
    pub fn value(&self) -> &'n Json<'a> {
        self.value
    }

    /// How many items or members the value has.
    #[must_use]
    pub fn len(&self) -> usize {
        match self.value {
            Json::Array(items) => items.len(),
            Json::Object(members) => members.len(),
            _ => 0,
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The members of an object that may have these keys; any other key is an error.
    #[must_use]
    pub fn fields(&self, known: &[&str]) -> Option<Fields<'n, 'a>> {
        let Json::Object(members) = self.value else { return self.refuse("must be an object") };
        let mut next = 0;
        for (place, (key, _)) in members.iter().enumerate() {
            let found = position_from(next, known.len(), |at| known[at] == key);
            next = found.map_or(next, |at| at + 1);
            if found.is_none() {
                let path = self.path.field(key, place);
                let fields = known.join(", ");
                match nearest(key, known.iter().copied()) {
                    Some(near) => {
                        let expected = format_args!("did you mean `{near}`? The fields here are {fields}");
                        self.report.add(&path, &expected, &"an unknown field");
                    }
                    None => {
                        let expected = format_args!("must not be there: the fields here are {fields}");
                        self.report.add(&path, &expected, &"an unknown field");
                    }
                }
            }
        }
        Some(Fields { members, path: self.path, report: self.report, next: Cell::new(0) })
    }
}

impl<'a> Fields<'_, 'a> {
    /// The field's value, which need not be there.
    #[must_use]
    pub fn node(&self, name: &'static str) -> Option<Node<'_, 'a>> {
        // The first of this name is meant, and a name that is there twice is refused in any case.
        let place = position_from(self.next.get(), self.members.len(), |at| self.members[at].0 == name)?;
        self.next.set(place + 1);
        let (_, value) = &self.members[place];
        Some(Node { value, path: self.path.field(name, place), report: self.report })
    }

    /// A field that must be there.
    pub fn get<T>(&self, name: &'static str, read: impl FnOnce(Node<'_, 'a>) -> Option<T>) -> Option<T> {
        let Some(node) = self.node(name) else {
            self.report.add(&self.path.missing(name), &"must be there", &"nothing");
            return None;
        };
        read(node)
    }

    /// A field with a default.
    pub fn or<T>(
        &self,
        name: &'static str,
        default: T,
        read: impl FnOnce(Node<'_, 'a>) -> Option<T>,
    ) -> Option<T> {
        self.node(name).map_or(Some(default), read)
    }

    /// A field without a default that need not be there: `Some(None)` when it is absent, `None` when it is wrong.
    pub fn maybe<T>(
        &self,
        name: &'static str,
        read: impl FnOnce(Node<'_, 'a>) -> Option<T>,
    ) -> Option<Option<T>> {
        self.node(name).map_or(Some(None), |node| read(node).map(Some))
    }
}

/// The first place that fits, of `count`, looked for from `start` on and then from the beginning.
fn position_from(start: usize, count: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    let start = start.min(count);
    (start..count).chain(0..start).find(|at| fits(*at))
}

/// The name that someone who wrote `text` may have meant.
#[must_use]
pub fn nearest<'k>(text: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    // Longer ones are no typing mistakes, and comparing them would be at the expense of the reader.
    const LONGEST: usize = 64;
    if text.len() > LONGEST {
        return None;
    }
    let plain = |text: &str| text.to_ascii_lowercase().replace('-', "_");
    let text = plain(text);
    let allowed = 1 + text.len() / 4;
    let distance = |name: &str| distance(text.as_bytes(), plain(name).as_bytes());
    let near = known.into_iter().map(|name| (distance(name), name)).min_by_key(|(distance, _)| *distance);
    near.filter(|(distance, name)| *distance <= allowed && *distance < name.len()).map(|(_, name)| name)
}

/// How many letters have to be added, removed or changed to get from one to the other.
fn distance(from: &[u8], to: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (at, letter) in from.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (place, other) in to.iter().enumerate() {
            let changed = diagonal + usize::from(letter != other);
            diagonal = row[place + 1];
            row[place + 1] = changed.min(diagonal + 1).min(row[place] + 1);
        }
    }
    row[to.len()]
}

fn within(range: &RangeInclusive<u64>) -> String {
    if range.start() == range.end() {
        range.start().to_string()
    } else {
        format!("{}..={}", range.start(), range.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_mistake_is_told_and_another_word_is_not() {
        let known = ["vcpus", "mem_mib", "data_disk_mib", "counts"];
        for (text, meant) in [
            ("vcpu", Some("vcpus")),
            ("memMib", Some("mem_mib")),
            ("mem-mib", Some("mem_mib")),
            ("data_disc_mib", Some("data_disk_mib")),
            ("count", Some("counts")),
            ("image", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(nearest(text, known), meant, "{text}");
        }
    }
}
