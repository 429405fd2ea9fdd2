//! Settings from a file and from the environment, under the flags.
//!
//! Every flag `--some-name` can also be given as `MVM_SOME_NAME` (under `agent` and `coordinator`:
//! `MVM_AGENT_SOME_NAME`, `MVM_COORDINATOR_SOME_NAME`) and as a line of the settings file:
//!
//! ```toml
//! timeout = "30s"                  # every command
//! [agent]                          # every `mvm agent ...`
//! data-dir = "/var/lib/mvm/agent"
//! [agent.serve]                    # one command
//! interval-secs = 10
//! ```
//!
//! A flag beats the environment, which beats the file. It is done by giving clap the file's values as defaults, so
//! that parsing, help and errors stay in one place. A setting that no command knows is an error.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Arg, Command, CommandFactory};

use crate::args::Cli;

/// Looked for in this order when neither `--config` nor `MVM_CONFIG` names a file.
const SYSTEM_FILE: &str = "/etc/mvm/config.toml";

/// The command line's grammar with environment names and the file's values laid under it.
pub(crate) fn layered_command() -> anyhow::Result<Command> {
    let command = with_environment(Cli::command(), &[]);
    match chosen_file()? {
        Some(path) => {
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("could not read the settings file {}", path.display()))?;
            layer(command, &text).with_context(|| format!("in the settings file {}", path.display()))
        }
        None => Ok(command),
    }
}

/// `--config FILE`, else `MVM_CONFIG`, else the user's, else the system's. Read before clap runs, since it feeds clap.
fn chosen_file() -> anyhow::Result<Option<PathBuf>> {
    let mut args = std::env::args_os().skip(1);
    while let Some(arg) = args.next() {
        let Some(text) = arg.to_str() else { continue };
        if text == "--" {
            break;
        }
        if text == "--config" {
            return Ok(args.next().map(PathBuf::from));
        }
        if let Some(path) = text.strip_prefix("--config=") {
            return Ok(Some(path.into()));
        }
    }
    if let Some(path) = std::env::var_os("MVM_CONFIG").filter(|path| !path.is_empty()) {
        return Ok(Some(path.into()));
    }
    let home = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config")));
    let candidates =
        home.map(|dir| dir.join("mvm/config.toml")).into_iter().chain([PathBuf::from(SYSTEM_FILE)]);
    Ok(candidates.into_iter().find(|path| path.is_file()))
}

fn with_environment(command: Command, path: &[&str]) -> Command {
    let prefix = match path.first() {
        Some(&group @ ("agent" | "coordinator")) => format!("MVM_{}_", group.to_uppercase()),
        _ => "MVM_".to_owned(),
    };
    let command = command.mut_args(|arg| {
        let Some(long) = arg.get_long().filter(|_| arg.get_env().is_none() && !is_builtin(&arg)) else {
            return arg;
        };
        let name = format!("{prefix}{}", long.to_uppercase().replace('-', "_"));
        arg.env(name)
    });
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name.clone(), |sub| {
            let path: Vec<&str> = path.iter().copied().chain([name.as_str()]).collect();
            with_environment(sub, &path)
        })
    })
}

fn is_builtin(arg: &Arg) -> bool {
    matches!(arg.get_id().as_str(), "help" | "version" | "config")
}

fn layer(command: Command, text: &str) -> anyhow::Result<Command> {
    let table: toml::Table = text.parse().context("not TOML")?;
    apply(command, &table, "")
}

/// Lays `table` under `command`: plain values are defaults of flags here and below, tables belong to subcommands.
fn apply(mut command: Command, table: &toml::Table, path: &str) -> anyhow::Result<Command> {
    // General settings first, so that a subcommand's own table overrides them.
    for (key, value) in table.iter().filter(|(_, value)| !value.is_table()) {
        let text = match value {
            toml::Value::String(text) => text.clone(),
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::Boolean(flag) => flag.to_string(),
            _ => bail!("{path}{key}: expected a string, a number or a boolean"),
        };
        if !knows(&command, key) {
            bail!("{path}{key}: no such setting; `mvm {}--help` lists them", path.replace('.', " "));
        }
        command = set_default(command, key, &text);
    }
    for (name, sub) in table.iter().filter_map(|(name, value)| Some((name, value.as_table()?))) {
        if command.find_subcommand(name).is_none() {
            bail!("[{path}{name}]: no such command");
        }
        let mut failure = None;
        command = command.mut_subcommand(name.clone(), |sub_command| {
            apply(sub_command.clone(), sub, &format!("{path}{name}.")).unwrap_or_else(|error| {
                failure = Some(error);
                sub_command
            })
        });
        if let Some(error) = failure {
            return Err(error);
        }
    }
    Ok(command)
}

fn knows(command: &Command, long: &str) -> bool {
    let here = command.get_arguments().any(|arg| arg.get_long() == Some(long) && !is_builtin(arg));
    here || command.get_subcommands().any(|sub| knows(sub, long))
}

fn set_default(command: Command, long: &str, text: &str) -> Command {
    let command = command.mut_args(|arg| {
        if arg.get_long() == Some(long) && !is_builtin(&arg) {
            arg.default_value(text.to_owned()).required(false)
        } else {
            arg
        }
    });
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    names
        .into_iter()
        .fold(command, |command, name| command.mut_subcommand(name, |sub| set_default(sub, long, text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(file: &str, args: &[&str]) -> clap::ArgMatches {
        let command = layer(with_environment(Cli::command(), &[]), file).unwrap();
        command.try_get_matches_from(args).unwrap()
    }

    fn interval(matches: &clap::ArgMatches) -> u64 {
        let (_, agent) = matches.subcommand().unwrap();
        let (_, serve) = agent.subcommand().unwrap();
        *serve.get_one::<u64>("interval_secs").unwrap()
    }

    #[test]
    fn a_flag_beats_the_file_and_the_narrower_table_beats_the_wider() {
        let file = "[agent]\ninterval-secs = 7\n[agent.serve]\ninterval-secs = 9\n";
        assert_eq!(interval(&parse(file, &["mvm", "agent", "serve"])), 9);
        assert_eq!(interval(&parse(file, &["mvm", "agent", "serve", "--interval-secs", "11"])), 11);
        assert_eq!(interval(&parse("[agent]\ninterval-secs = 7\n", &["mvm", "agent", "serve"])), 7);
        assert_eq!(interval(&parse("", &["mvm", "agent", "serve"])), 30);
    }

    #[test]
    fn a_setting_or_a_table_that_no_command_knows_is_an_error() {
        for file in
            ["intervall-secs = 3", "[agent.serve]\nnope = 1", "[agnet]\n", "[agent]\ninterval-secs = [1]"]
        {
            assert!(layer(Cli::command(), file).is_err(), "{file}");
        }
    }

    #[test]
    fn every_flag_has_one_environment_name_and_the_grammar_is_sound() {
        with_environment(Cli::command(), &[]).debug_assert();
        let command = with_environment(Cli::command(), &[]);
        let serve = command.find_subcommand("agent").unwrap().find_subcommand("serve").unwrap();
        let arg = serve.get_arguments().find(|arg| arg.get_long() == Some("interval-secs")).unwrap();
        assert_eq!(arg.get_env().unwrap(), "MVM_AGENT_INTERVAL_SECS");
    }
}
