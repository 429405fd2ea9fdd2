//! Declared objects from files: YAML and JSON, several documents each, folders, standard input.
//!
//! Everything is read and checked before anything of it is used, and everything that is wrong is told at once, with
//! file, document and path. What comes out is in the order in which objects that name each other are made.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use mvm_proto::FieldError;
use mvm_proto::json::Json;
use mvm_proto::object::{Declared, KINDS, MAX_OBJECT_BYTES, kind_named, read_tree};
use serde_json::Value;

use crate::objects::Name;
use crate::yaml::{self, MAX_TEXT_BYTES, Tree};

/// What a folder's files end with that are read.
const ENDINGS: [&str; 3] = ["yaml", "yml", "json"];

/// An object as a file declares it.
#[derive(Debug, Clone)]
pub struct Entry {
    pub declared: Declared,
    /// As it is sent: what the file says, and the tenant where the file leaves it out.
    pub json: Value,
    pub place: Place,
}

impl Entry {
    #[must_use]
    pub fn name(&self) -> Name {
        let metadata = &self.declared.metadata;
        let tenant = metadata.tenant.as_ref().map(ToString::to_string);
        Name::of(self.declared.kind, tenant.as_deref(), &metadata.name)
    }
}

/// Where an object was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub file: String,
    /// Counted from 1; none where the whole file is meant.
    pub document: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        self.document.map_or(Ok(()), |document| write!(f, ", document {document}"))
    }
}

/// One thing that is wrong with the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub place: Place,
    pub error: FieldError,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.error)
    }
}

/// Everything that is wrong with the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(faults) = self;
        let count = faults.len();
        write!(
            f,
            "{count} error{} in what is declared; nothing was sent",
            if count == 1 { "" } else { "s" }
        )?;
        faults.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

impl std::error::Error for Faults {}

/// The tenant that a command was given for objects that name none.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tenant<'a> {
    pub name: Option<&'a str>,
    /// Objects that name another one are refused.
    pub is_only: bool,
}

/// Reads files, folders (their `.yaml`, `.yml` and `.json` files, not those below), and standard input, as `-`.
pub fn read(paths: &[PathBuf], tenant: Tenant<'_>) -> Result<Vec<Entry>, Faults> {
    let mut reading = Reading { tenant, entries: Vec::new(), faults: Vec::new() };
    for path in paths {
        if path == Path::new("-") {
            reading.text("standard input", &limited(std::io::stdin().lock()), yaml::either);
        } else if path.is_dir() {
            reading.folder(path);
        } else {
            reading.file(path);
        }
    }
    reading.finish()
}

/// The same of a text that is no file.
pub fn read_text(name: &str, text: &str, tenant: Tenant<'_>) -> Result<Vec<Entry>, Faults> {
    let mut reading = Reading { tenant, entries: Vec::new(), faults: Vec::new() };
    reading.text(name, &Ok(text.to_owned()), yaml::either);
    reading.finish()
}

fn limited(source: impl Read) -> Result<String, String> {
    let mut bytes = Vec::new();
    // One more than is read: the limit is told where the text is.
    let limit = MAX_TEXT_BYTES as u64 + 1;
    source.take(limit).read_to_end(&mut bytes).map_err(|cause| cause.to_string())?;
    String::from_utf8(bytes)
        .map_err(|cause| format!("an invalid byte at offset {}", cause.utf8_error().valid_up_to()))
}

struct Reading<'t> {
    tenant: Tenant<'t>,
    entries: Vec<Entry>,
    faults: Vec<Fault>,
}

impl Reading<'_> {
    fn refuse(&mut self, place: &Place, expected: &str, found: &str) {
        self.faults.push(Fault { place: place.clone(), error: FieldError::from((expected, found)) });
    }

    fn folder(&mut self, folder: &Path) {
        let place = Place { file: folder.display().to_string(), document: None };
        let is_read = |path: &PathBuf| {
            let ending = path.extension().and_then(|ending| ending.to_str());
            path.is_file() && ending.is_some_and(|ending| ENDINGS.contains(&ending))
        };
        let listed = std::fs::read_dir(folder).and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>()
        });
        match listed {
            Err(cause) => self.refuse(&place, "must be readable", &cause.to_string()),
            Ok(mut files) => {
                files.retain(is_read);
                files.sort();
                if files.is_empty() {
                    self.refuse(&place, "must hold files that end with .yaml, .yml or .json", "none");
                }
                files.iter().for_each(|file| self.file(file));
            }
        }
    }

    fn file(&mut self, path: &Path) {
        let text = std::fs::File::open(path).map_err(|cause| cause.to_string()).and_then(limited);
        let is_json = path.extension().is_some_and(|ending| ending == "json");
        let split: fn(&str) -> Vec<Tree<'_>> =
            if is_json { |text| vec![yaml::json(text)] } else { yaml::documents };
        self.text(&path.display().to_string(), &text, split);
    }

    fn text(&mut self, file: &str, text: &Result<String, String>, split: fn(&str) -> Vec<Tree<'_>>) {
        let whole = Place { file: file.to_owned(), document: None };
        let text = match text {
            Ok(text) => text,
            Err(cause) => return self.refuse(&whole, "must be readable as UTF-8", cause),
        };
        let trees = split(text);
        if trees.is_empty() {
            self.refuse(&whole, "must declare an object", "nothing");
        }
        let several = trees.len() > 1 || trees.iter().any(|tree| tree.number > 1);
        for Tree { number, errors, tree } in trees {
            let place = Place { file: file.to_owned(), document: several.then_some(number) };
            let faults = errors.into_iter().map(|error| Fault { place: place.clone(), error });
            self.faults.extend(faults);
            match tree {
                // A list of objects, as `get -o json` and `-o yaml` print it.
                Some(Json::Array(items)) => {
                    let items = items.into_iter().enumerate();
                    items.for_each(|(index, item)| self.object(&place, item, &format!("[{index}]")));
                }
                Some(tree) => self.object(&place, tree, ""),
                None => {}
            }
        }
    }

    fn object(&mut self, place: &Place, mut tree: Json<'_>, prefix: &str) {
        self.put_tenant(&mut tree);
        let mut refuse = |path: &str, expected: String, found: String| {
            let path = match (prefix, path) {
                (prefix, path) if prefix.is_empty() || path.is_empty() || path.starts_with('[') => {
                    format!("{prefix}{path}")
                }
                (prefix, path) => format!("{prefix}.{path}"),
            };
            self.faults.push(Fault { place: place.clone(), error: FieldError { path, expected, found } });
        };
        let declared = match read_tree(&tree) {
            Ok(declared) => declared,
            Err(errors) => {
                return errors.into_iter().for_each(|error| refuse(&error.path, error.expected, error.found));
            }
        };
        let json = match serde_json::to_value(&tree) {
            Ok(json) => json,
            Err(cause) => return refuse("", "must be writable as JSON".to_owned(), cause.to_string()),
        };
        let length = json.to_string().len();
        if length > MAX_OBJECT_BYTES {
            let expected = format!("must be at most {MAX_OBJECT_BYTES} bytes long as JSON");
            return refuse("", expected, format!("{length} bytes"));
        }
        let entry = Entry { declared, json, place: place.clone() };
        if let (true, Some(only), Some(tenant)) =
            (self.tenant.is_only, self.tenant.name, &entry.declared.metadata.tenant)
            && tenant.as_str() != only
        {
            let expected = format!("must be {only}, as the command says");
            return refuse("metadata.tenant", expected, tenant.to_string());
        }
        let name = entry.name();
        if let Some(other) = self.entries.iter().find(|other| other.name() == name) {
            let expected = format!("{name} must be declared once");
            return refuse("", expected, format!("another in {}", other.place));
        }
        self.entries.push(entry);
    }

    /// Gives an object of a tenant's kind the tenant that the command was given, unless it names one.
    fn put_tenant(&self, tree: &mut Json<'_>) {
        let kind = match tree.get("kind") {
            Some(Json::Str(kind)) => kind_named(kind).ok(),
            _ => None,
        };
        let (Some(tenant), true) = (self.tenant.name, kind.is_some_and(|kind| kind.is_tenant_scoped()))
        else {
            return;
        };
        let Json::Object(members) = tree else { return };
        if let Some((_, Json::Object(metadata))) = members.iter_mut().find(|(key, _)| key == "metadata")
            && metadata.iter().all(|(key, _)| key != "tenant")
        {
            metadata.push(("tenant".into(), Json::Str(tenant.to_owned().into())));
        }
    }

    fn finish(mut self) -> Result<Vec<Entry>, Faults> {
        if !self.faults.is_empty() {
            return Err(Faults(self.faults));
        }
        self.entries.sort_by_key(|entry| order(&entry.name()));
        Ok(self.entries)
    }
}

/// Where objects of this kind come when objects are made.
#[must_use]
pub fn order(name: &Name) -> usize {
    KINDS.iter().position(|kind| kind.name == name.kind.name).unwrap_or(KINDS.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: &str = "api_version: mvm/v1\nkind: Pool\nmetadata: { name: workers }\n\
                        spec: { image: { ref: 'builtin:busybox' }, resources: { vcpus: 1, mem_mib: 64 } }\n";
    const TENANT: &str = "api_version: mvm/v1\nkind: Tenant\nmetadata: { name: acme }\n";

    const ACME: Tenant<'_> = Tenant { name: Some("acme"), is_only: false };

    fn written(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn names(entries: &[Entry]) -> Vec<String> {
        entries.iter().map(|entry| entry.name().to_string()).collect()
    }

    #[test]
    fn a_folder_is_read_in_the_order_in_which_objects_are_made() {
        let folder = written(&[("a.yaml", POOL), ("b.yml", TENANT), ("c.txt", "{"), ("d.json", "[]")]);
        let entries = read(&[folder.path().to_owned()], ACME).unwrap();
        assert_eq!(names(&entries), ["tenant/acme", "pool/acme/workers"]);
        assert_eq!(entries[1].json["metadata"]["tenant"], "acme", "as it is sent");
        assert!(entries[1].json["spec"].get("counts").is_none(), "defaults are the server's");
    }

    #[test]
    fn everything_wrong_in_all_files_is_told_at_once_with_file_document_and_path() {
        let two = format!("{TENANT}---\n{}", POOL.replace("vcpus", "vcpu"));
        let folder = written(&[
            ("a.yaml", &two),
            (
                "b.json",
                r#"{"api_version": "mvm/v1", "kind": "Pol", "metadata": {"name": "A"}, "x": 1, "x": 2}"#,
            ),
            ("c.yaml", "# nothing\n"),
            ("d.yaml", &format!("- {}", TENANT.replace('\n', "\n  ").replace("acme", "A"))),
            ("e.yaml", TENANT),
        ]);
        let missing = folder.path().join("missing.yaml");
        let faults = read(&[folder.path().to_owned(), missing], Tenant::default()).unwrap_err();
        let told = faults.to_string();
        let has = |part: &str| assert!(told.contains(part), "{part}: {told}");
        has("a.yaml, document 2: spec.resources.vcpu: did you mean `vcpus`?");
        has("a.yaml, document 2: spec.resources.vcpus: must be there");
        has("a.yaml, document 2: metadata: must have the field tenant");
        has("b.json: x: must appear once");
        has("b.json: kind: there is no such kind; did you mean Pool?");
        has("b.json: metadata.name: ");
        has("c.yaml: document: must declare an object, found nothing");
        has("d.yaml: [0].metadata.name: ");
        has("e.yaml: document: tenant/acme must be declared once, found another in");
        has("missing.yaml: document: must be readable as UTF-8");
    }

    #[test]
    fn an_object_of_another_tenant_than_the_command_names_is_refused() {
        let other = POOL.replace("workers", "workers, tenant: other");
        let only = Tenant { is_only: true, ..ACME };
        let told = read_text("it", &other, only).unwrap_err().to_string();
        assert!(told.contains("metadata.tenant: must be acme, as the command says, found other"), "{told}");
        assert_eq!(names(&read_text("it", &other, ACME).unwrap()), ["pool/other/workers"]);
    }

    #[test]
    fn an_object_that_no_server_takes_is_refused_here() {
        let long = format!("{TENANT}spec: {{}}\n").replace(
            "{ name: acme }",
            &format!(
                "{{ name: acme, annotations: {{ {} }} }}",
                (0..40).map(|n| format!("k{n}: {}", "x".repeat(7000))).collect::<Vec<_>>().join(", ")
            ),
        );
        let told = read_text("it", &long, ACME).unwrap_err().to_string();
        assert!(told.contains("must be at most 262144 bytes long as JSON"), "{told}");
    }
}
