//! Which top-level modules of a crate import which, read from its sources.
//!
//! `crate::a::x`, `crate::{a::x, b}` and a `super::` chain that ends at the root all count, and so does a name that the
//! root passes on for a module (`pub use a::X`, used as `crate::X`). Tests don't count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::sources;

/// Each module with those that it imports.
pub(crate) type Graph = BTreeMap<String, BTreeSet<String>>;

/// The imports between the top-level modules of the crate whose sources are in `folder`.
pub(crate) fn imports(folder: &Path) -> Graph {
    let sources = sources::under(folder);
    let prefix = folder.strip_prefix(crate::tree::root()).unwrap().display().to_string() + "/";
    let parts = |name: &str| -> Vec<String> {
        let path = name.strip_prefix(&prefix).unwrap().trim_end_matches(".rs");
        path.split('/').map(str::to_owned).collect()
    };
    let is_root = |module: &str| matches!(module, "lib" | "main");
    let modules: BTreeSet<String> = sources.iter().map(|source| parts(&source.name).remove(0)).collect();
    let mut reexported = BTreeMap::new();
    for source in sources.iter().filter(|source| is_root(parts(&source.name)[0].as_str())) {
        let text = shipped(source);
        for at in text.match_indices("use ").map(|(at, _)| at) {
            for path in paths(&text[at + 4..]) {
                if let [module, .., name] = path.as_slice()
                    && modules.contains(module)
                {
                    reexported.insert(name.clone(), module.clone());
                }
            }
        }
    }
    let mut graph: Graph =
        modules.iter().filter(|m| !is_root(m)).map(|m| (m.clone(), BTreeSet::new())).collect();
    for source in &sources {
        let place = parts(&source.name);
        let Some(imported) = graph.get_mut(&place[0]) else { continue };
        let text = shipped(source);
        let to_root = "super::".repeat(place.len());
        for start in ["crate::", &to_root] {
            for (at, _) in text.match_indices(start) {
                if text[..at].ends_with("::")
                    || text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
                {
                    continue;
                }
                for path in paths(&text[at + start.len()..]) {
                    let named = path.first().map(String::as_str).unwrap_or_default();
                    let module = if modules.contains(named) {
                        Some(named)
                    } else {
                        reexported.get(named).map(String::as_str)
                    };
                    imported.extend(
                        module.filter(|module| *module != place[0] && !is_root(module)).map(str::to_owned),
                    );
                }
            }
        }
    }
    graph
}

fn shipped(source: &sources::Source) -> String {
    source.shipped_lines().into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("\n")
}

/// The paths at the beginning of a text, braces spelled out: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn paths(text: &str) -> Vec<Vec<String>> {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    if let Some(inner) = rest.strip_prefix("::").filter(|_| !word.is_empty()) {
        let below = paths(inner).into_iter().map(|path| [vec![word.to_owned()], path].concat());
        return below.collect();
    }
    if !word.is_empty() {
        return vec![vec![word.to_owned()]];
    }
    let Some(inside) = rest.strip_prefix('{') else { return vec![Vec::new()] };
    let (mut depth, mut begin, mut found) = (0, 0, Vec::new());
    for (at, c) in inside.char_indices() {
        match c {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                found.extend(paths(inside[begin..at].trim_start()));
                begin = at + 1;
                if c == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    found
}

/// The modules of the largest set in which each imports each, if only through others; empty where there is no cycle.
pub(crate) fn largest_cycle(graph: &Graph) -> BTreeSet<&str> {
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|m| (m.as_str(), reached(graph, m))).collect();
    let cycle = |module: &str| -> BTreeSet<&str> {
        reach[module].iter().copied().filter(|other| reach[other].contains(module)).collect()
    };
    reach.keys().map(|module| cycle(module)).max_by_key(BTreeSet::len).unwrap_or_default()
}

fn reached<'a>(graph: &'a Graph, from: &'a str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(module) = open.pop() {
        open.extend(graph[module].iter().map(String::as_str).filter(|next| reached.insert(*next)));
    }
    reached
}
