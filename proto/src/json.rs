//! JSON as a tree that borrows from its text, read strictly: for input that other people wrote.
//!
//! serde_json does the lexing; this module keeps what its own tree forgets. Keys stay in the order of the text, a key
//! that appears twice is an error instead of the last one winning, and depth, size and the number of values are
//! capped before memory is spent on them. [`Fields`] and [`Node`] turn the tree into typed values and collect
//! everything that is wrong on the way in a [`Report`]. [`Json::read_from`] makes the same tree of another format's
//! values, of YAML's say.

mod escape;
mod fields;
mod report;

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap as _, Serializer};

use crate::FieldError;

pub use escape::{MAX_SHOWN, quote, shorten};
pub use fields::{Fields, Node, nearest};
pub use report::{MAX_ERRORS, Path, Report};

/// How deeply arrays and objects may nest. The document needs 7; a parser's stack should never be the limit.
pub const MAX_DEPTH: usize = 32;

/// How many values one text may hold. A valid document needs at least 8 bytes for each, so the largest document fits,
/// while a text of nothing but `0,0,0,...` can't be blown up to many times its size.
pub const MAX_VALUES: usize = 512 * 1024;

/// Integers above this are not the same number to every JSON reader.
pub const MAX_INTEGER: u64 = (1 << 53) - 1;

/// Below this many keys, comparing each with each is cheaper than sorting them.
const FEW_KEYS: usize = 24;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

#[derive(Debug, Clone, PartialEq)]
pub enum Json<'a> {
    Null,
    Bool(bool),
    Number(Number),
    Str(Cow<'a, str>),
    Array(Vec<Json<'a>>),
    /// In the order of the text.
    Object(Vec<(Cow<'a, str>, Json<'a>)>),
}

/// A number as it was written: `1`, `-1`, or with a fraction or exponent (or too large for 64 bits).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    Unsigned(u64),
    Negative(i64),
    Float(f64),
}

impl<'a> Json<'a> {
    /// Reads one JSON value, or says everything that is wrong with it as JSON.
    pub fn parse(bytes: &'a [u8], max_bytes: usize) -> Result<Self, Vec<FieldError>> {
        let report = Report::default();
        let value = Self::read(bytes, max_bytes, &report);
        match (value, report.into_errors()) {
            (Some(value), errors) if errors.is_empty() => Ok(value),
            (_, errors) => Err(errors),
        }
    }

    /// Like [`Json::parse`], but a value with duplicate keys is reported and still given back,
    /// so that the reader of its fields can go on to find what else is wrong.
    pub fn read(bytes: &'a [u8], max_bytes: usize, report: &Report) -> Option<Self> {
        let refuse = |expected: &dyn fmt::Display, found: &dyn fmt::Display| {
            report.add(&Path::ROOT, expected, found);
            None
        };
        if bytes.len() > max_bytes {
            let expected = format_args!("must be at most {max_bytes} bytes long");
            return refuse(&expected, &format_args!("{} bytes", bytes.len()));
        }
        if bytes.starts_with(BYTE_ORDER_MARK) {
            return refuse(&"must not begin with a byte order mark", &"bytes ef bb bf");
        }
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(cause) => {
                let found = format_args!("an invalid byte at offset {}", cause.valid_up_to());
                return refuse(&"must be UTF-8", &found);
            }
        };
        let reader = Reader::of(max_bytes);
        let mut source = serde_json::Deserializer::from_str(text);
        let outcome = Seed { reader: &reader, depth: 0 }
            .deserialize(&mut source)
            .and_then(|value| source.end().map(|()| value));
        reader.finish(outcome, "must be one JSON value", report)
    }

    /// The same from a deserializer that tells what each value is, as YAML's do. What JSON does not have is an error:
    /// tags, NaN and infinities, keys that are no scalars. `max_bytes` bounds all text of the tree, since a short YAML
    /// text can repeat a long one; `form` says what the source must be where it is something else.
    pub fn read_from<D: Deserializer<'a>>(
        source: D,
        max_bytes: usize,
        form: &'static str,
        report: &Report,
    ) -> Option<Self> {
        let reader = Reader::of(max_bytes);
        let outcome = Seed { reader: &reader, depth: 0 }.deserialize(source);
        reader.finish(outcome, form, report)
    }

    /// The first value of this key, when this is an object that has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Json::Object(members) => members.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }
}

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Json::Null => to.serialize_unit(),
            Json::Bool(value) => to.serialize_bool(*value),
            Json::Number(Number::Unsigned(value)) => to.serialize_u64(*value),
            Json::Number(Number::Negative(value)) => to.serialize_i64(*value),
            Json::Number(Number::Float(value)) => to.serialize_f64(*value),
            Json::Str(text) => to.serialize_str(text),
            Json::Array(items) => to.collect_seq(items),
            Json::Object(members) => {
                let mut map = to.serialize_map(Some(members.len()))?;
                for (key, value) in members {
                    map.serialize_entry(key, value)?;
                }
                map.end()
            }
        }
    }
}

/// Short enough for an error message, and safe to show on a terminal.
impl fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Null => f.write_str("null"),
            Json::Bool(value) => value.fmt(f),
            Json::Number(Number::Unsigned(value)) => value.fmt(f),
            Json::Number(Number::Negative(value)) => value.fmt(f),
            Json::Number(Number::Float(value)) => write!(f, "{value:?}"),
            Json::Str(text) => f.write_str(&quote(text)),
            Json::Array(items) => write!(f, "an array of {}", items.len()),
            Json::Object(members) => write!(f, "an object of {}", members.len()),
        }
    }
}

/// What one reading keeps count of.
struct Reader {
    values: Cell<usize>,
    /// How much text there may yet be.
    bytes_left: Cell<usize>,
    duplicates: Cell<bool>,
    /// The rule that ended the reading, and what broke it.
    broken: Cell<Option<(&'static str, &'static str)>>,
}

impl Reader {
    fn of(max_bytes: usize) -> Self {
        Self {
            values: Cell::new(0),
            bytes_left: Cell::new(max_bytes),
            duplicates: Cell::new(false),
            broken: Cell::new(None),
        }
    }

    fn broken<E: serde::de::Error>(&self, rule: &'static str, by: &'static str) -> E {
        self.broken.set(Some((rule, by)));
        E::custom(rule)
    }

    fn count<E: serde::de::Error>(&self, text: &str) -> Result<(), E> {
        let left = self.bytes_left.get().checked_sub(text.len());
        self.bytes_left
            .set(left.ok_or_else(|| self.broken("must not hold more text than its limit", "more"))?);
        Ok(())
    }

    fn finish<'a, E: fmt::Display>(
        &self,
        outcome: Result<Json<'a>, E>,
        form: &str,
        report: &Report,
    ) -> Option<Json<'a>> {
        match outcome {
            Ok(value) => {
                if self.duplicates.get() {
                    report_duplicates(&value, &Path::ROOT, report);
                }
                Some(value)
            }
            Err(cause) => {
                let cause = cause.to_string();
                match self.broken.get() {
                    Some((rule, by)) => {
                        let place = cause.rfind(" at line ").map_or("", |at| &cause[at..]);
                        report.add(&Path::ROOT, &rule, &format_args!("{by}{place}"));
                    }
                    None => report.add(&Path::ROOT, &form, &shorten(&cause)),
                }
                None
            }
        }
    }
}

/// Reads one value at this depth.
#[derive(Clone, Copy)]
struct Seed<'r> {
    reader: &'r Reader,
    depth: usize,
}

impl Seed<'_> {
    fn inner<E: serde::de::Error>(self) -> Result<Self, E> {
        if self.depth == MAX_DEPTH {
            return Err(self.reader.broken("must nest at most 32 levels deep", "more"));
        }
        Ok(Self { depth: self.depth + 1, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Json<'de>;
    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<Json<'de>, D::Error> {
        let values = self.reader.values.get() + 1;
        if values > MAX_VALUES {
            return Err(self.reader.broken("must hold at most 524288 values", "more"));
        }
        self.reader.values.set(values);
        source.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Json<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E>(self) -> Result<Json<'de>, E> {
        Ok(Json::Null)
    }
    /// YAML's null.
    fn visit_none<E>(self) -> Result<Json<'de>, E> {
        Ok(Json::Null)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Json<'de>, E> {
        Ok(Json::Bool(value))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Json<'de>, E> {
        Ok(Json::Number(Number::Unsigned(value)))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Json<'de>, E> {
        Ok(Json::Number(Number::Negative(value)))
    }
    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Json<'de>, E> {
        if !value.is_finite() {
            return Err(self.reader.broken("must hold finite numbers only", "another"));
        }
        Ok(Json::Number(Number::Float(value)))
    }
    fn visit_borrowed_str<E: serde::de::Error>(self, text: &'de str) -> Result<Json<'de>, E> {
        self.reader.count(text)?;
        Ok(Json::Str(Cow::Borrowed(text)))
    }
    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Json<'de>, E> {
        self.reader.count(text)?;
        Ok(Json::Str(Cow::Owned(text.to_owned())))
    }
    /// YAML's tagged values.
    fn visit_enum<A: EnumAccess<'de>>(self, _: A) -> Result<Json<'de>, A::Error> {
        Err(self.reader.broken("must have no tags", "a tag"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut source: A) -> Result<Json<'de>, A::Error> {
        let inner = self.inner()?;
        let mut items = Vec::new();
        while let Some(item) = source.next_element_seed(inner)? {
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut source: A) -> Result<Json<'de>, A::Error> {
        let inner = self.inner()?;
        let mut members = Vec::new();
        while let Some(key) = source.next_key_seed(KeySeed { reader: self.reader })? {
            members.push((key, source.next_value_seed(inner)?));
        }
        if has_duplicates(&members) {
            self.reader.duplicates.set(true);
        }
        Ok(Json::Object(members))
    }
}

struct KeySeed<'r> {
    reader: &'r Reader,
}

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Cow<'de, str>;
    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<Cow<'de, str>, D::Error> {
        source.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for KeySeed<'_> {
    type Value = Cow<'de, str>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
    fn visit_borrowed_str<E: serde::de::Error>(self, text: &'de str) -> Result<Cow<'de, str>, E> {
        self.reader.count(text)?;
        Ok(Cow::Borrowed(text))
    }
    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Cow<'de, str>, E> {
        self.reader.count(text)?;
        Ok(Cow::Owned(text.to_owned()))
    }
}

fn has_duplicates(members: &[(Cow<'_, str>, Json<'_>)]) -> bool {
    if members.len() <= FEW_KEYS {
        // Keys that were never seen with this length and these letters are new; only the others are compared.
        let mut seen = [0_u64; 4];
        return members.iter().enumerate().any(|(i, (key, _))| {
            let mark = mark_of(key.as_bytes());
            let (word, bit) = (&mut seen[usize::from(mark >> 6)], 1_u64 << (mark & 63));
            let is_new = *word & bit == 0;
            *word |= bit;
            !is_new && members[..i].iter().any(|(known, _)| known == key)
        });
    }
    let mut keys: Vec<&str> = members.iter().map(|(key, _)| key.as_ref()).collect();
    keys.sort_unstable();
    keys.windows(2).any(|pair| pair[0] == pair[1])
}

/// A number that equal keys share, and that different ones rarely do.
fn mark_of(key: &[u8]) -> u8 {
    let letter = |at: usize| key.get(at).copied().unwrap_or(0);
    let length = u8::try_from(key.len() & 0xff).unwrap_or(0);
    let last = letter(key.len().saturating_sub(1));
    let marks = [letter(0), letter(key.len() / 2), last, length];
    marks.into_iter().fold(0_u8, |mark, part| mark.wrapping_mul(31).wrapping_add(part))
}

/// The slow walk that finds where the duplicates are, made only when there are any.
fn report_duplicates(value: &Json<'_>, path: &Path<'_>, report: &Report) {
    match value {
        Json::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                report_duplicates(item, &path.item(index), report);
            }
        }
        Json::Object(members) => {
            let mut seen = BTreeSet::new();
            for (place, (key, value)) in members.iter().enumerate() {
                let path = path.field(key, place);
                if !seen.insert(key.as_ref()) {
                    report.add(&path, &"must appear once", &"the key a second time");
                }
                report_duplicates(value, &path, report);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;
