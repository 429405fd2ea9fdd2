//! Where in a JSON text something is, and everything found wrong with it.

use std::cell::{Cell, RefCell};
use std::fmt::{self, Write as _};

use super::escape::{quote, shorten};
use crate::FieldError;

/// The most errors that are listed; what exceeds them is counted. Each costs far more memory than the few bytes of
/// bad input that cause it, and people read no further.
pub const MAX_ERRORS: usize = 200;

/// The place of a field that is not there: after all that are.
const NOWHERE: usize = usize::MAX;

/// The way from the root to one value, as a list through the callers' stack frames: it costs nothing until shown.
#[derive(Clone, Copy)]
pub struct Path<'p> {
    step: Option<(&'p Path<'p>, Step<'p>)>,
}

#[derive(Clone, Copy)]
enum Step<'p> {
    Field { name: &'p str, place: usize },
    Item(usize),
}

impl<'p> Path<'p> {
    pub const ROOT: Path<'static> = Path { step: None };

    /// The field of this name, which is the object's member number `place`.
    #[must_use]
    pub fn field(&'p self, name: &'p str, place: usize) -> Self {
        Self { step: Some((self, Step::Field { name, place })) }
    }

    /// A field that should be there.
    #[must_use]
    pub fn missing(&'p self, name: &'p str) -> Self {
        self.field(name, NOWHERE)
    }

    #[must_use]
    pub fn item(&'p self, index: usize) -> Self {
        Self { step: Some((self, Step::Item(index))) }
    }

    /// Where this is in the text, comparable: the places of all steps from the root.
    fn places(&self) -> Vec<usize> {
        let mut places = Vec::new();
        let mut at = self;
        while let Some((parent, step)) = &at.step {
            places.push(match step {
                Step::Field { place, .. } => *place,
                Step::Item(index) => *index,
            });
            at = parent;
        }
        places.reverse();
        places
    }
}

/// `tenants[0].pools[1].instance_resources.vcpus`; a key that is not a plain word is quoted: `tenants[0]["a b"]`.
impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((parent, step)) = &self.step else { return Ok(()) };
        parent.fmt(f)?;
        match step {
            Step::Item(index) => write!(f, "[{index}]"),
            Step::Field { name, .. } if is_word(name) => {
                if parent.step.is_some() {
                    f.write_char('.')?;
                }
                f.write_str(name)
            }
            Step::Field { name, .. } => write!(f, "[{}]", quote(name)),
        }
    }
}

impl fmt::Debug for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn is_word(key: &str) -> bool {
    (1..=64).contains(&key.len())
        && key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
}

/// Collects what is wrong, wherever it is found, and gives it back in the order of the text.
#[derive(Debug, Default)]
pub struct Report {
    errors: RefCell<Vec<(Vec<usize>, FieldError)>>,
    unlisted: Cell<usize>,
}

impl Report {
    /// Adds an error. `expected` is ours; `found` has to be short and escaped already, as [`super::Json`] shows itself.
    pub fn add(&self, path: &Path<'_>, expected: &dyn fmt::Display, found: &dyn fmt::Display) {
        let mut errors = self.errors.borrow_mut();
        if errors.len() == MAX_ERRORS {
            self.unlisted.set(self.unlisted.get() + 1);
            return;
        }
        let error =
            FieldError { path: path.to_string(), expected: expected.to_string(), found: found.to_string() };
        errors.push((path.places(), error));
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.errors.borrow().is_empty()
    }

    /// All errors in the order of the text; the ones about what is missing come last in their object.
    #[must_use]
    pub fn into_errors(self) -> Vec<FieldError> {
        let mut errors = self.errors.into_inner();
        errors.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut errors: Vec<_> = errors.into_iter().map(|(_, error)| error).collect();
        let unlisted = self.unlisted.get();
        if unlisted > 0 {
            let expected = format!("only {MAX_ERRORS} errors are listed");
            errors.push(FieldError { path: String::new(), expected, found: format!("{unlisted} more") });
        }
        errors
    }
}

/// One error about a whole input.
impl From<(&str, &str)> for FieldError {
    fn from((expected, found): (&str, &str)) -> Self {
        Self { path: String::new(), expected: expected.to_owned(), found: shorten(found) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_every_step_and_quotes_what_is_not_a_word() {
        let tenants = Path::ROOT.field("tenants", 2);
        let tenant = tenants.item(0);
        assert_eq!(tenant.field("quotas", 0).to_string(), "tenants[0].quotas");
        assert_eq!(tenant.field("a\u{1b}[2J", 0).to_string(), r#"tenants[0]["a\u{1b}[2J"]"#);
        assert_eq!(Path::ROOT.to_string(), "");
    }

    #[test]
    fn errors_come_out_in_the_order_of_the_text_with_missing_fields_last() {
        let report = Report::default();
        report.add(&Path::ROOT.missing("c"), &"", &"");
        report.add(&Path::ROOT.field("b", 1), &"", &"");
        report.add(&Path::ROOT.field("a", 0).field("x", 7), &"", &"");
        let paths: Vec<_> = report.into_errors().into_iter().map(|error| error.path).collect();
        assert_eq!(paths, ["a.x", "b", "c"]);
    }

    #[test]
    fn errors_beyond_the_limit_are_counted_not_kept() {
        let report = Report::default();
        for index in 0..MAX_ERRORS + 5 {
            report.add(&Path::ROOT.item(index), &"must not be", &"it");
        }
        let errors = report.into_errors();
        assert_eq!(errors.len(), MAX_ERRORS + 1);
        assert_eq!(errors[MAX_ERRORS].found, "5 more");
    }
}
