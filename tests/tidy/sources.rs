//! Our own files: sources line by line, manifests, and what must not be in either.

use std::path::{Path, PathBuf};

use crate::tree::root;

/// What cargo or git fill; in a worktree git has a file.
const NOT_OURS: [&str; 3] = ["target", ".git", "node_modules"];

pub(crate) struct Source {
    /// The path from the root of the repository.
    pub(crate) name: String,
    pub(crate) text: String,
}

/// Every Rust source in the repository.
pub(crate) fn ours() -> Vec<Source> {
    under(root())
}

/// Every Rust source below a folder.
pub(crate) fn under(folder: &Path) -> Vec<Source> {
    let is_rust = |path: &Path| path.extension().is_some_and(|extension| extension == "rs");
    files(folder).into_iter().filter(|path| is_rust(path)).map(|path| Source::read(&path)).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let skipped = NOT_OURS.iter().any(|name| entry.file_name() == *name);
            let kind = entry.file_type().unwrap();
            if kind.is_dir() && !skipped {
                folders.push(entry.path());
            } else if kind.is_file() && !skipped {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

/// `file:line: text` for each line that has one of the words.
pub(crate) fn lines_with(sources: &[Source], words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources {
        for (line, text) in source.lines() {
            if words.iter().any(|word| text.contains(word)) {
                found.push(format!("{}:{line}: {}", source.name, text.trim()));
            }
        }
    }
    found
}

impl Source {
    fn read(path: &Path) -> Self {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        Self { name, text: std::fs::read_to_string(path).unwrap() }
    }

    /// The lines of code with their numbers: comments are not code.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let numbered = self.text.lines().enumerate().map(|(index, text)| (index + 1, text));
        numbered.filter(|(_, text)| !text.trim_start().starts_with("//"))
    }

    /// Where the tests begin: the first line of a file of tests, else the `#[cfg(test)]` before a module with a body.
    pub(crate) fn tests_from(&self) -> usize {
        let file_of_tests = self.name.starts_with("tests/")
            || self.name.contains("/tests/")
            || self.name.ends_with("/tests.rs")
            || self.name.ends_with("_tests.rs");
        let marked = || {
            let mut pairs = self.lines().zip(self.lines().skip(1));
            let begins = |first: &str, next: &str| {
                first.trim() == "#[cfg(test)]" && next.starts_with("mod ") && next.ends_with('{')
            };
            pairs.find(|((_, first), (_, next))| begins(first, next)).map(|((line, _), _)| line)
        };
        if file_of_tests { 0 } else { marked().unwrap_or(usize::MAX) }
    }

    /// The lines that end up in a program.
    pub(crate) fn shipped_lines(&self) -> Vec<(usize, &str)> {
        let end = self.tests_from();
        self.lines().filter(|(line, _)| *line < end).collect()
    }
}

/// What is wrong with a crate's manifest: everything shared is written down once, for all crates.
pub(crate) fn manifest_faults(path: &Path) -> Vec<String> {
    let name = path.strip_prefix(root()).unwrap().display().to_string();
    let manifest = std::fs::read_to_string(path).unwrap();
    let mut faults = Vec::new();
    let mut section = "";
    let mut has_lints = false;
    for (index, line) in manifest.lines().map(str::trim).enumerate() {
        if line.starts_with('[') {
            section = line.trim_matches(['[', ']']);
        } else if line.is_empty() || line.starts_with('#') {
        } else if section == "lints" {
            has_lints |= line == "workspace = true";
        } else if section.ends_with("dependencies") && !line.replace(' ', "").contains("workspace=true") {
            faults.push(format!("{name}:{}: `{line}` is not from [workspace.dependencies]", index + 1));
        }
    }
    if !has_lints {
        faults.push(format!("{name}: does not take the workspace's lints"));
    }
    for key in ["version", "edition", "rust-version", "license"] {
        if !manifest.contains(&format!("{key}.workspace = true")) {
            faults.push(format!("{name}: has its own {key}"));
        }
    }
    faults
}

/// Lines that name a place on someone's machine.
pub(crate) fn machine_paths() -> Vec<String> {
    // Put together here, so that this file does not break its own rule.
    let words = ["/wor\u{6b}/", "/roo\u{74}/", "/hom\u{65}/", "/User\u{73}/", "../share\u{64}"];
    // A guest's paths are not this machine's; documents are full of them.
    let checked = ["rs", "toml", "md", "sh", "proto", "yml", "yaml", "py"];
    let mut found = Vec::new();
    for path in files(root()) {
        let extension = path.extension().and_then(|extension| extension.to_str());
        if !extension.is_none_or(|extension| checked.contains(&extension)) {
            continue;
        }
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        for (index, line) in text.lines().enumerate() {
            if words.iter().any(|word| names_a_place(line, word)) {
                found.push(format!("{name}:{}: {}", index + 1, line.trim()));
            }
        }
    }
    found
}

/// Whether the word begins a path: `pki/root/` goes on from something and does not count.
fn names_a_place(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '}' | ')' | '>' | '*'))
    })
}
