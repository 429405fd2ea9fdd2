//! What is started as the workload: what the image says, and in its place what the pool says.

use std::collections::BTreeMap;

use crate::protocol::workload_override::User;
use crate::protocol::{Words, WorkloadOverride};
use crate::settings::{ImageConfig, ReadyWhen};

/// What is not said otherwise, of all programs.
const LEAST: [(&str, &str); 3] = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    (HOME, "/root"),
    ("LANG", "C.UTF-8"),
];
pub(crate) const HOME: &str = "HOME";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// The program and its arguments; empty: there is no workload.
    pub(crate) words: Vec<String>,
    pub(crate) ready: ReadyWhen,
    pub(crate) directory: String,
    pub(crate) user: Option<User>,
    /// What the image and the pool say of the environment.
    pub(crate) env: BTreeMap<String, String>,
}

impl Program {
    pub(crate) fn of(image: &ImageConfig, pool: Option<&WorkloadOverride>) -> Result<Self, String> {
        let nothing = WorkloadOverride::default();
        let pool = pool.unwrap_or(&nothing);
        let args = pool.args.as_ref().map(|args| args.words.as_slice());
        let words = match (&pool.command, args) {
            (None, None) => image.workload.clone(),
            (Some(Words { words }), args) => [words.as_slice(), args.unwrap_or_default()].concat(),
            (None, Some(args)) => match image.workload.first() {
                Some(program) => std::iter::once(program).chain(args).cloned().collect(),
                None => return Err("the pool names arguments, and the image no program".to_owned()),
            },
        };
        let mut env = image.env.clone();
        env.extend(pool.env.clone());
        let directory = if pool.directory.is_empty() { "/" } else { pool.directory.as_str() };
        Ok(Self { words, ready: image.ready, directory: directory.to_owned(), user: pool.user.clone(), env })
    }
}

/// What a program gets: the least, then what the image and the pool say, then what `reborn` says.
pub(crate) fn environment(
    said: Option<&Program>,
    reborn: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut env: BTreeMap<_, _> = LEAST.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    env.extend(said.into_iter().flat_map(|said| said.env.clone()));
    env.extend(reborn.clone());
    env
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn pool(command: Option<&[&str]>, args: Option<&[&str]>) -> WorkloadOverride {
        let of = |list: Option<&[&str]>| list.map(|list| Words { words: words(list) });
        WorkloadOverride { command: of(command), args: of(args), ..WorkloadOverride::default() }
    }

    #[test]
    fn a_command_replaces_the_images_and_arguments_alone_keep_its_program() {
        let image = ImageConfig { workload: words(&["/app", "--quiet"]), ..ImageConfig::default() };
        for (command, args, run) in [
            (None, None, &["/app", "--quiet"][..]),
            (Some(&["/bin/sh", "-c"][..]), None, &["/bin/sh", "-c"]),
            (Some(&["/bin/sh"]), Some(&["-c", ""][..]), &["/bin/sh", "-c", ""]),
            (None, Some(&["--loud"]), &["/app", "--loud"]),
            (None, Some(&[]), &["/app"]),
        ] {
            let program = Program::of(&image, Some(&pool(command, args))).unwrap();
            assert_eq!(program.words, words(run), "{command:?} {args:?}");
        }
        let none = ImageConfig::default();
        assert_eq!(Program::of(&none, Some(&pool(Some(&["/x"]), None))).unwrap().words, ["/x"]);
        assert!(
            Program::of(&none, Some(&pool(None, Some(&[])))).unwrap_err().contains("the image no program")
        );
        assert_eq!(Program::of(&none, None).unwrap().words, [""; 0]);
    }

    #[test]
    fn variables_of_the_pool_come_before_the_images_and_after_the_instances_own() {
        let of = |list: &[(&str, &str)]| -> BTreeMap<String, String> {
            list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let image = ImageConfig { env: of(&[("A", "image"), ("B", "image")]), ..ImageConfig::default() };
        let pool = WorkloadOverride {
            env: of(&[("B", "pool"), ("C", "pool"), ("LANG", "C")]),
            ..WorkloadOverride::default()
        };
        let program = Program::of(&image, Some(&pool)).unwrap();
        let env = environment(Some(&program), &of(&[("C", "instance")]));
        let of = |name: &str| env.get(name).map(String::as_str);
        assert_eq!([of("A"), of("B"), of("C")], [Some("image"), Some("pool"), Some("instance")]);
        assert_eq!((of("LANG"), of(HOME)), (Some("C"), Some("/root")));
        assert_eq!((program.directory.as_str(), program.user), ("/", None));
    }
}
