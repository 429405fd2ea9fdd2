//! Settings from the environment, a context and a file, under the flags: a flag beats the environment, which beats the
//! context, which beats the file.
//!
//! Every flag is a setting with one [`Place`]: a table of the file and a key in it, which also make its environment name
//! (`[agent] data-dir`, `MVM_AGENT_DATA_DIR`). Flags of several commands that mean the same have the same place. It is
//! done by giving clap names and defaults, so that parsing, help and errors stay in one place. `docs/settings.md` is
//! made of the same list.

mod file;
#[cfg(test)]
mod page;

use std::collections::BTreeSet;
use std::ffi::OsStr;

use clap::{Arg, ArgAction, Command, CommandFactory, FromArgMatches as _};

use crate::args::{AgentServe, Cli};
use crate::contexts::{self, Context, Contexts};

/// Settings of this machine's agent: its own, and of all commands that look at its folder.
const AGENT: &str = "agent";
/// Settings of this machine's coordinator.
const COORDINATOR: &str = "coordinator";
/// Whom commands talk to, and as whom.
const CLIENT: &str = "client";
/// The development cluster of this machine.
const DEV: &str = "dev";
/// Tables whose settings many commands share.
const SHARED: [&str; 4] = [AGENT, COORDINATOR, CLIENT, DEV];

/// What `[client]` holds, with the names that it has in the environment.
const CLIENT_NAMES: [(&str, &str); 5] = [
    ("MVM_COORDINATOR", "coordinator"),
    ("MVM_ENDPOINT", "endpoint"),
    ("MVM_NODE_ENDPOINT", "node-endpoint"),
    ("MVM_OPERATOR_DIR", "operator-dir"),
    ("MVM_TENANT", "tenant"),
];

/// The command line's grammar with environment names and the file's values laid under it.
pub(crate) fn layered_command() -> anyhow::Result<Command> {
    let command = with_environment(Cli::command());
    let command = match file::chosen() {
        Some(path) => file::lay(command, &Cli::command(), &path)?,
        None => command,
    };
    let chosen = file::named_early("--context", "MVM_CONTEXT");
    let contexts = contexts::file().map(|file| Contexts::load(&file)).transpose()?.unwrap_or_default();
    let context = contexts.in_force(chosen.as_deref().and_then(OsStr::to_str))?;
    Ok(lay_context(command, context))
}

/// The command line of `mvm agent serve`, read with the grammar of that command alone. None where it is another one, where a context
/// is named, or where anything about it or its settings file is to be told: the whole grammar does that.
pub(crate) fn agent_serve() -> Option<Cli> {
    let mut args = std::env::args_os().skip(1);
    let is_daemon = args.next()? == AGENT && args.next()? == "serve";
    if !is_daemon || file::named_early("--context", "MVM_CONTEXT").is_some() {
        return None;
    }
    let command = with_environment(AgentServe::command());
    let command = match file::chosen() {
        Some(path) => file::lay(command, &AgentServe::command(), &path).ok()?,
        None => command,
    };
    let matches = command.try_get_matches().ok()?;
    AgentServe::from_arg_matches(&matches).ok().map(Cli::from)
}

/// Makes what a context says the defaults of the flags that it is for. An agent serves one cluster, whatever its user
/// works with.
fn lay_context(command: Command, context: Option<&Context>) -> Command {
    let Some(context) = context else { return command };
    let values = context.values();
    change_args(command, &[], &mut |path, arg| {
        let name = arg.get_env().and_then(OsStr::to_str);
        let value = values.iter().find(|(known, _)| name == Some(known)).map(|(_, value)| value.clone());
        match value.filter(|_| path.first().is_none_or(|first| first != AGENT)) {
            Some(value) => arg.default_value(value).required(false),
            None => arg,
        }
    })
}

/// Where a setting is: `[table] key`. What every command takes has no table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    table: String,
    key: String,
}

/// A flag of one command.
#[derive(Debug, Clone)]
struct Setting {
    /// The words of the command.
    command: Vec<String>,
    arg: Arg,
    long: String,
    place: Place,
}

impl Setting {
    fn is_switch(&self) -> bool {
        is_switch(&self.arg)
    }

    fn is_repeatable(&self) -> bool {
        matches!(self.arg.get_action(), ArgAction::Append)
    }
}

/// Which flags are shared, read from the commands that run the two daemons.
struct Places {
    agent: BTreeSet<String>,
    coordinator: BTreeSet<String>,
}

impl Places {
    fn of(command: &Command) -> Self {
        let longs = |group: &str| {
            let serve = command.find_subcommand(group).and_then(|group| group.find_subcommand("serve"));
            let args = serve.into_iter().flat_map(Command::get_arguments);
            args.filter_map(|arg| arg.get_long().map(str::to_owned)).collect()
        };
        Self { agent: longs(AGENT), coordinator: longs(COORDINATOR) }
    }

    /// A flag that names its environment variable says with it where it belongs.
    fn place(&self, command: &[String], arg: &Arg) -> Option<Place> {
        let long = arg.get_long().filter(|_| !is_builtin(arg))?;
        let at = |table: &str, key: &str| Some(Place { table: table.to_owned(), key: key.to_owned() });
        let named = arg.get_env().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some((_, key)) = CLIENT_NAMES.iter().find(|(name, _)| *name == named) {
            return at(CLIENT, key);
        }
        for table in [AGENT, COORDINATOR, DEV] {
            if let Some(rest) = named.strip_prefix(&format!("MVM_{}_", table.to_uppercase())) {
                return at(table, &rest.to_lowercase().replace('_', "-"));
            }
        }
        if arg.is_global_set() {
            return at("", long);
        }
        match as_served(command).first().map(String::as_str) {
            Some(AGENT) if self.agent.contains(long) => at(AGENT, long),
            Some(COORDINATOR) if self.coordinator.contains(long) => at(COORDINATOR, long),
            _ => at(&command.join("."), long),
        }
    }
}

/// `mvm doctor` judges what `mvm agent serve` would do with the same settings.
fn as_served(command: &[String]) -> Vec<String> {
    match command {
        [doctor] if doctor == "doctor" => vec![AGENT.to_owned(), "serve".to_owned()],
        command => command.to_vec(),
    }
}

fn is_builtin(arg: &Arg) -> bool {
    matches!(arg.get_id().as_str(), "help" | "version" | "config" | "context")
}

fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

/// Every setting of every command.
fn all(command: &Command) -> Vec<Setting> {
    fn walk(command: &Command, path: &mut Vec<String>, places: &Places, found: &mut Vec<Setting>) {
        found.extend(command.get_arguments().filter_map(|arg| {
            let place = places.place(path, arg)?;
            let long = arg.get_long()?.to_owned();
            Some(Setting { command: path.clone(), arg: arg.clone(), long, place })
        }));
        for sub in command.get_subcommands() {
            path.push(sub.get_name().to_owned());
            walk(sub, path, places, found);
            path.pop();
        }
    }
    let mut found = Vec::new();
    walk(command, &mut Vec::new(), &Places::of(command), &mut found);
    found
}

/// Applies `change` to the flags of every command.
fn change_args(command: Command, path: &[String], change: &mut dyn FnMut(&[String], Arg) -> Arg) -> Command {
    let command = command.mut_args(|arg| change(path, arg));
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name.clone(), |sub| {
            let path: Vec<String> = path.iter().cloned().chain([name.clone()]).collect();
            change_args(sub, &path, change)
        })
    })
}

fn with_environment(command: Command) -> Command {
    let places = Places::of(&command);
    change_args(command, &[], &mut |path, arg| {
        let Some(place) = places.place(path, &arg) else { return arg };
        let name = environment_name(&place, &arg);
        let arg = if is_switch(&arg) { arg.value_parser(boolean) } else { arg };
        // A unit file may name a variable and give it no value.
        if std::env::var_os(&name).is_some_and(|value| value.is_empty()) {
            return arg.env(clap::builder::Resettable::Reset);
        }
        arg.env(name)
    })
}

fn environment_name(place: &Place, arg: &Arg) -> String {
    if let Some(name) = arg.get_env() {
        return name.to_string_lossy().into_owned();
    }
    let words = [place.table.as_str(), place.key.as_str()].into_iter().filter(|word| !word.is_empty());
    let words: Vec<String> = words.map(|word| word.to_uppercase().replace(['-', '.'], "_")).collect();
    format!("MVM_{}", words.join("_"))
}

/// What switches a flag on or off in the environment and in the file.
fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        _ => Err("use 1, true, yes or on; or 0, false, no or off".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn every_flag_has_one_environment_name_and_the_grammar_is_sound() {
        with_environment(Cli::command()).debug_assert();
        let name = |command: &str, long: &str| {
            let words: Vec<_> = command.split(' ').map(str::to_owned).collect();
            let found = all(&Cli::command()).into_iter().find(|one| one.command == words && one.long == long);
            let found = found.unwrap();
            environment_name(&found.place, &found.arg)
        };
        assert_eq!(name("agent serve", "interval-secs"), "MVM_AGENT_INTERVAL_SECS");
        assert_eq!(name("doctor", "cgroups"), "MVM_AGENT_CGROUPS");
        assert_eq!(name("image list", "images-dir"), "MVM_AGENT_IMAGES_DIR");
        assert_eq!(name("agent certs status", "certs-dir"), "MVM_AGENT_CERTS_DIR");
        assert_eq!(name("coordinator token list", "coordinator"), "MVM_COORDINATOR");
        assert_eq!(name("push", "coordinator-dir"), "MVM_COORDINATOR_DATA_DIR");
        assert_eq!(name("push", "dry-run"), "MVM_PUSH_DRY_RUN");
    }

    #[test]
    fn the_daemons_own_grammar_has_what_the_whole_one_has_for_it() {
        let of = |command: &Command| {
            let found = all(command).into_iter();
            let found = found.filter(|one| one.command.is_empty() || one.command == ["agent", "serve"]);
            let shown = |one: Setting| {
                let (name, defaults) = (environment_name(&one.place, &one.arg), one.arg.get_default_values());
                format!("{:?} {} {name} {defaults:?}", one.place, one.long)
            };
            found.map(shown).collect::<Vec<_>>()
        };
        AgentServe::command().debug_assert();
        let whole = of(&Cli::command());
        assert!(whole.len() > 40, "{whole:?}");
        assert_eq!(of(&AgentServe::command()), whole);
    }

    #[test]
    fn one_environment_name_is_one_setting_whatever_the_command() {
        let mut known: BTreeMap<String, Setting> = BTreeMap::new();
        for setting in all(&Cli::command()) {
            let name = environment_name(&setting.place, &setting.arg);
            let Some(other) = known.get(&name) else {
                known.insert(name, setting);
                continue;
            };
            let command = [other, &setting].map(|one| one.command.join(" "));
            assert_eq!(other.place, setting.place, "{name} of {command:?}");
            assert_eq!(other.is_switch(), setting.is_switch(), "{name} of {command:?}");
            assert_eq!(other.is_repeatable(), setting.is_repeatable(), "{name} of {command:?}");
            assert_eq!(other.arg.get_value_names(), setting.arg.get_value_names(), "{name} of {command:?}");
            let (a, b) = (other.arg.get_default_values(), setting.arg.get_default_values());
            assert!(a == b || a.is_empty() || b.is_empty(), "{name} of {command:?}: {a:?} and {b:?}");
        }
    }

    #[test]
    fn a_flag_beats_a_context_and_a_context_beats_the_file() {
        let context = Context {
            coordinator: Some("https://context:4433".to_owned()),
            tenant: Some("acme".parse().unwrap()),
            ..Context::default()
        };
        let parse = |args: &[&str]| {
            let command = file::lay_text(
                with_environment(Cli::command()),
                &Cli::command(),
                "[client]\ncoordinator = \"https://file:4433\"\noperator-dir = \"/of/file\"\n",
            );
            let command = lay_context(command.unwrap(), Some(&context));
            let mut matches = command.try_get_matches_from(args).unwrap();
            while let Some((_, below)) = matches.remove_subcommand() {
                matches = below;
            }
            matches
        };
        let coordinator =
            |args: &[&str]| parse(args).get_one::<mvm_transport::Target>("coordinator").unwrap().to_string();
        assert_eq!(coordinator(&["mvm", "node", "list"]), "https://context:4433");
        let said = ["mvm", "node", "list", "--coordinator", "https://flag:4433"];
        assert_eq!(coordinator(&said), "https://flag:4433");
        assert_eq!(coordinator(&["mvm", "agent", "serve"]), "https://file:4433");
        let get = parse(&["mvm", "get", "pools"]);
        assert_eq!(get.get_one::<mvm_proto::TenantId>("tenant").unwrap().as_str(), "acme");
        let dir = get.get_one::<std::path::PathBuf>("operator_dir");
        assert_eq!(dir.unwrap().to_str(), Some("/of/file"), "the context says nothing of it");
    }

    #[test]
    fn what_switches_a_flag_is_understood_in_every_usual_way() {
        for (text, meant) in [("1", true), ("TRUE", true), ("yes", true), ("on", true)] {
            assert_eq!(boolean(text), Ok(meant));
        }
        for (text, meant) in [("0", false), ("False", false), ("no", false), ("off", false)] {
            assert_eq!(boolean(text), Ok(meant));
        }
        assert!(boolean("maybe").is_err());
    }
}
