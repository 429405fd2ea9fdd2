//! Desired-state documents to start from. The files are beside this crate; `README.md` there says what each shows.
//!
//! `mvm push -f examples/minimal.json --node NODE` pushes one as it is: `--node` replaces its `node_id`.

/// A document that a newcomer can push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Example {
    /// The file's name.
    pub name: &'static str,
    /// What it shows, in one line.
    pub about: &'static str,
    pub json: &'static str,
}

pub const MINIMAL: Example = Example {
    name: "minimal.json",
    about: "one tenant with one small pool, and every optional field left out",
    json: include_str!("../minimal.json"),
};

pub const POOLS: Example = Example {
    name: "pools.json",
    about: "a pool with running, warm and sleeping instances, and its sleep policy",
    json: include_str!("../pools.json"),
};

pub const TWO_TENANTS: Example = Example {
    name: "two-tenants.json",
    about: "two tenants side by side, each with its own network and quotas",
    json: include_str!("../two-tenants.json"),
};

pub const GATEWAY_AND_WORKERS: Example = Example {
    name: "gateway-and-workers.json",
    about: "roles: a pinned gateway, a builder, and workers that scale from zero",
    json: include_str!("../gateway-and-workers.json"),
};

pub const PRODUCTION: Example = Example {
    name: "production.json",
    about: "what a production cluster wants besides: image digests, secrets, strict seccomp, encrypted snapshots",
    json: include_str!("../production.json"),
};

/// From the simplest to the fullest.
pub const ALL: [Example; 5] = [MINIMAL, POOLS, TWO_TENANTS, GATEWAY_AND_WORKERS, PRODUCTION];

#[cfg(test)]
mod tests {
    use mvm_proto::DesiredState;

    use super::*;

    fn parse(example: &Example) -> DesiredState {
        DesiredState::parse(example.json.as_bytes())
            .unwrap_or_else(|errors| panic!("{}: {errors}", example.name))
    }

    #[test]
    fn every_example_is_valid_and_for_the_same_node() {
        for example in &ALL {
            assert_eq!(parse(example).node_id.as_str(), "node-a", "{}", example.name);
        }
    }

    #[test]
    fn only_the_production_example_names_image_digests() {
        for example in &ALL {
            let document = parse(example);
            let missing = document.pools_without_image_digest().len();
            let expected = if *example == PRODUCTION { 0 } else { document.pools().count() };
            assert_eq!(missing, expected, "{}", example.name);
        }
    }

    #[test]
    fn every_document_in_the_folder_is_listed_and_described() {
        let readme = include_str!("../README.md");
        let folder = std::fs::read_dir(env!("CARGO_MANIFEST_DIR")).unwrap();
        let mut files: Vec<_> = folder
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".json"))
            .collect();
        files.sort();
        let mut listed = ALL.map(|example| example.name);
        listed.sort_unstable();
        assert_eq!(files, listed);
        assert!(listed.iter().all(|name| readme.contains(name)));
    }
}
