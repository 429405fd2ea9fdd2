//! The dependency tree as cargo tells it, and the lists of `deny.toml`.
//!
//! `cargo metadata` knows how our crates are connected. What is really built for our platform only `cargo tree` knows:
//! metadata unites the features of all platforms, and lists crates that none of ours ever compiles.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// What we run on: other systems' dependencies are not our tree.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

pub(crate) struct Tree {
    /// Our crates.
    pub(crate) members: Vec<Member>,
    /// Everything else that is built.
    pub(crate) packages: Vec<Package>,
    elsewhere: Vec<String>,
}

pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
}

pub(crate) struct Dependency {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) requirement: String,
    pub(crate) from_registry: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Normal,
    Dev,
    Build,
}

pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) licence: Option<String>,
}

impl fmt::Display for Package {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}

/// The repository's root, as the build sees it.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// What cargo answers to these arguments.
fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(arguments)
        .arg("--locked")
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

impl Tree {
    pub(crate) fn read() -> Self {
        let metadata: Value = serde_json::from_str(&cargo(&["metadata", "--format-version", "1"])).unwrap();
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let ours: BTreeSet<_> = list(&metadata["workspace_members"]).iter().map(text).collect();
        let mut tree = Self { members: Vec::new(), packages: Vec::new(), elsewhere: Vec::new() };
        for package in list(&metadata["packages"]) {
            let id = text(&package["id"]);
            if ours.contains(&id) {
                tree.members.push(Member::from(&package));
            } else if package["source"] != REGISTRY {
                tree.elsewhere.push(format!("{id} is not from crates.io"));
            }
        }
        tree.packages = built(&tree.members);
        assert!(!tree.members.is_empty() && tree.packages.len() > 50, "cargo said too little");
        tree
    }

    pub(crate) fn sources_outside_the_registry(&self) -> Vec<String> {
        self.elsewhere.clone()
    }
}

/// What `cargo tree` is asked, whatever is made of its answer.
const TREE: [&str; 9] = [
    "tree",
    "--workspace",
    "--all-features",
    "--target",
    PLATFORM,
    "--edges",
    "normal,build,dev",
    "--prefix",
    "none",
];

/// What is compiled for our platform besides our own crates.
fn built(members: &[Member]) -> Vec<Package> {
    let listing = cargo(&[&TREE[..], &["--format", "{p}|{l}"]].concat());
    let lines: BTreeSet<_> =
        listing.lines().map(|line| line.trim_end_matches(" (*)")).filter(|line| !line.is_empty()).collect();
    let package = |line: &str| {
        let (package, licence) = line.split_once('|').unwrap();
        let mut words = package.split(' ');
        Package {
            name: words.next().unwrap().to_owned(),
            version: words.next().unwrap().trim_start_matches('v').to_owned(),
            licence: Some(licence.to_owned()).filter(|licence| !licence.is_empty()),
        }
    };
    let not_ours = |package: &Package| members.iter().all(|member| member.name != package.name);
    lines.into_iter().map(package).filter(not_ours).collect()
}

impl From<&Value> for Member {
    fn from(package: &Value) -> Self {
        let dependencies = package["dependencies"].as_array().cloned().unwrap_or_default();
        let dependency = |value: &Value| Dependency {
            name: text(&value["name"]),
            kind: match value["kind"].as_str() {
                Some("dev") => Kind::Dev,
                Some("build") => Kind::Build,
                _ => Kind::Normal,
            },
            requirement: text(&value["req"]),
            from_registry: value["source"] == REGISTRY,
        };
        Self {
            name: text(&package["name"]),
            folder: Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap().to_owned(),
            dependencies: dependencies.iter().map(dependency).collect(),
        }
    }
}

/// A crate that may not be built, but for those that name it themselves.
#[derive(Debug)]
pub(crate) struct Ban {
    pub(crate) name: String,
    wrappers: Vec<String>,
}

impl Ban {
    fn read(line: &str) -> Option<Self> {
        let name = line.split('"').nth(1)?.to_owned();
        let wrappers = line.split_once("wrappers = [").and_then(|(_, rest)| rest.split_once(']'));
        let wrappers =
            wrappers.map(|(list, _)| list.split('"').skip(1).step_by(2).map(str::to_owned).collect());
        Some(Self { name, wrappers: wrappers.unwrap_or_default() })
    }

    /// Who depends on it without being allowed to.
    pub(crate) fn broken_by(&self) -> Vec<String> {
        let inverted = ["--invert", &self.name, "--depth", "1"];
        let listing = cargo(&[&TREE[..], &inverted, &["--format", "{p}"]].concat());
        let dependents = listing.lines().skip(1).filter_map(|line| line.split(' ').next());
        dependents.filter(|name| !self.wrappers.iter().any(|w| w == name)).map(str::to_owned).collect()
    }
}

/// The lists of `deny.toml` that are held here too. It is read line by line: its lists have one item on each.
#[derive(Debug, Default)]
pub(crate) struct DenyFile {
    pub(crate) licences: Vec<String>,
    pub(crate) banned: Vec<Ban>,
    pub(crate) skipped: Vec<String>,
}

impl DenyFile {
    pub(crate) fn read() -> Self {
        let file = std::fs::read_to_string(root().join("deny.toml")).unwrap();
        let mut lists = Self::default();
        let mut list = "";
        for line in file.lines().map(str::trim) {
            match line.split_once(" = [") {
                Some((name, "")) => list = name,
                _ if line == "]" => list = "",
                _ => {
                    let first_string = line.split('"').nth(1).map(str::to_owned);
                    match list {
                        "allow" => lists.licences.extend(first_string),
                        "deny" => lists.banned.extend(Ban::read(line)),
                        "skip" => lists.skipped.extend(first_string),
                        _ => {}
                    }
                }
            }
        }
        assert!(
            lists.licences.len() > 3 && lists.banned.len() > 3,
            "deny.toml was not understood: {lists:?}"
        );
        lists
    }
}
