//! The settings file: TOML, with a table for what many commands share and one for each command.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use clap::{Arg, ArgAction, Command};

use super::{Place, SHARED, Setting, all, as_served, boolean, change_args};

/// Looked for when neither `--config` nor `MVM_CONFIG` names a file, and the user has none.
const SYSTEM_FILE: &str = "/etc/mvm/config.toml";

/// A misspelt word differs from what was meant by no more letters than this.
const TYPING_ERRORS: usize = 3;

/// `--config FILE`, else `MVM_CONFIG`, else the user's, else the system's. Read before clap runs, since it feeds clap.
pub(super) fn chosen() -> Option<PathBuf> {
    if let Some(path) = named_early("--config", "MVM_CONFIG") {
        return Some(path.into());
    }
    let home = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config")));
    let candidates =
        home.map(|dir| dir.join("mvm/config.toml")).into_iter().chain([PathBuf::from(SYSTEM_FILE)]);
    candidates.into_iter().find(|path| path.is_file())
}

/// What a flag that feeds clap is given, else its environment variable.
pub(super) fn named_early(flag: &str, variable: &str) -> Option<OsString> {
    let mut args = std::env::args_os().skip(1);
    while let Some(arg) = args.next() {
        let Some(text) = arg.to_str() else { continue };
        if text == "--" {
            break;
        }
        if text == flag {
            return args.next();
        }
        if let Some(value) = text.strip_prefix(flag).and_then(|rest| rest.strip_prefix('=')) {
            return Some(value.into());
        }
    }
    std::env::var_os(variable).filter(|value| !value.is_empty())
}

/// Makes the file's values the defaults of the flags that they are for. `written` is the command's grammar as it is written: names
/// for the environment are made of places, not the other way round.
pub(super) fn lay(command: Command, written: &Command, path: &Path) -> anyhow::Result<Command> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("could not read the settings file {}", path.display()))?;
    lay_text(command, written, &text).with_context(|| format!("in the settings file {}", path.display()))
}

type Values = BTreeMap<Place, Vec<String>>;

pub(super) fn lay_text(command: Command, written: &Command, text: &str) -> anyhow::Result<Command> {
    let table: toml::Table = text.parse().context("it is not TOML")?;
    let settings = all(written);
    let mut values = Values::new();
    read(&table, "", &Known::of(&settings), &mut values)?;
    let mut given: BTreeMap<(Vec<String>, String), Vec<String>> = BTreeMap::new();
    for setting in &settings {
        let Some((place, value)) = value_of(setting, &values) else { continue };
        let value = checked(setting, value).with_context(|| place.told())?;
        given.insert((setting.command.clone(), setting.long.clone()), value);
    }
    Ok(change_args(command, &[], &mut |path, arg| {
        let long = arg.get_long().unwrap_or_default().to_owned();
        match given.remove(&(path.to_vec(), long)) {
            Some(value) => arg.default_values(value).required(false),
            None => arg,
        }
    }))
}

/// The command's own table goes before what it shares with others.
fn value_of<'a>(setting: &Setting, values: &'a Values) -> Option<(Place, &'a Vec<String>)> {
    let own = [setting.command.clone(), as_served(&setting.command)];
    let own = own.into_iter().map(|command| Place { table: command.join("."), key: setting.long.clone() });
    own.chain([setting.place.clone()]).find_map(|place| values.get(&place).map(|value| (place, value)))
}

impl Place {
    fn told(&self) -> String {
        if self.table.is_empty() { self.key.clone() } else { format!("[{}] {}", self.table, self.key) }
    }
}

/// All tables and keys that there are.
struct Known {
    tables: BTreeMap<String, BTreeSet<String>>,
}

impl Known {
    fn of(settings: &[Setting]) -> Self {
        let mut tables: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for setting in settings {
            let Place { table, key } = setting.place.clone();
            tables.entry(table).or_default().insert(key);
            if !setting.command.is_empty() {
                tables.entry(setting.command.join(".")).or_default().insert(setting.long.clone());
            }
        }
        Self { tables }
    }

    /// Also one that only holds others, as `[image]` holds `[image.build]`.
    fn check_table(&self, name: &str) -> anyhow::Result<()> {
        let holds = |table: &String| table == name || table.starts_with(&format!("{name}."));
        if self.tables.keys().any(holds) {
            return Ok(());
        }
        let words = self.tables.keys().filter(|table| !table.is_empty()).map(String::as_str);
        match closest(name, words) {
            Some(meant) => bail!("[{name}] is no table of settings: did you mean [{meant}]?"),
            None => bail!("[{name}] is no table of settings: docs/settings.md lists them"),
        }
    }

    fn check_key(&self, place: &Place) -> anyhow::Result<()> {
        let keys = self.tables.get(&place.table);
        if keys.is_some_and(|keys| keys.contains(&place.key)) {
            return Ok(());
        }
        let told = place.told();
        let key = place.key.to_lowercase().replace('_', "-");
        let holding =
            self.tables.iter().filter(|(_, keys)| keys.contains(&key)).map(|(table, _)| table.as_str());
        let (shared, own): (Vec<_>, Vec<_>) =
            holding.partition(|table| table.is_empty() || SHARED.contains(table));
        let near = keys.and_then(|keys| closest(&key, keys.iter().map(String::as_str)));
        let elsewhere = if shared.is_empty() { own } else { shared };
        match (near, elsewhere.as_slice()) {
            // Spelt as if for another program.
            (Some(meant), tables) if meant == key || tables.is_empty() => {
                bail!("{told} is no setting: did you mean {meant}?")
            }
            (None, []) => bail!("{told} is no setting: docs/settings.md lists them"),
            (_, tables) => {
                let places: Vec<_> = tables.iter().map(|table| place_of(table)).collect();
                bail!("{told} is no setting: did you mean {key} {}?", places.join(" or "))
            }
        }
    }
}

fn place_of(table: &str) -> String {
    if table.is_empty() { "at the top of the file".to_owned() } else { format!("in [{table}]") }
}

/// The word that was meant, if one is near.
fn closest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase().replace('_', "-");
    let near = known.map(|other| (distance(&word, other), other));
    let most = TYPING_ERRORS.min(word.len() / 2);
    near.filter(|(distance, _)| *distance <= most).min().map(|(_, other)| other)
}

/// How many letters have to be added, removed or changed to make one word of the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.chars().enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, other) in b.iter().enumerate() {
            let changed = before + usize::from(letter != *other);
            before = row[j + 1];
            row[j + 1] = changed.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

fn read(table: &toml::Table, name: &str, known: &Known, values: &mut Values) -> anyhow::Result<()> {
    for (key, value) in table {
        if let Some(inner) = value.as_table() {
            let inner_name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
            known.check_table(&inner_name)?;
            read(inner, &inner_name, known, values)?;
            continue;
        }
        let place = Place { table: name.to_owned(), key: key.clone() };
        known.check_key(&place)?;
        let texts = match value {
            toml::Value::Array(items) => items.iter().map(text_of).collect::<Option<Vec<_>>>(),
            one => text_of(one).map(|text| vec![text]),
        };
        let texts =
            texts.ok_or_else(|| anyhow!("{}: expected a string, a number or a boolean", place.told()))?;
        values.insert(place, texts);
    }
    Ok(())
}

fn text_of(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    }
}

/// What the flag itself would take.
fn checked(setting: &Setting, value: &[String]) -> anyhow::Result<Vec<String>> {
    if value.len() != 1 && !setting.is_repeatable() {
        bail!("expected one value, found {}", value.len());
    }
    if setting.is_switch() {
        return value
            .iter()
            .map(|text| boolean(text).map(|on| on.to_string()).map_err(|e| anyhow!(e)))
            .collect();
    }
    let long = setting.long.clone();
    let arg = Arg::new("value").long(long.clone()).action(ArgAction::Append).allow_hyphen_values(true);
    let alone = Command::new("mvm")
        .no_binary_name(true)
        .disable_help_flag(true)
        .arg(arg.value_parser(setting.arg.get_value_parser().clone()));
    let words = value.iter().map(|text| format!("--{long}={text}"));
    alone.try_get_matches_from(words).map_err(|error| {
        let told = error.to_string();
        anyhow!("{}", told.lines().next().unwrap_or_default().trim_start_matches("error: "))
    })?;
    Ok(value.to_vec())
}

#[cfg(test)]
mod tests {
    use super::super::with_environment;
    use clap::CommandFactory as _;

    use super::*;
    use crate::args::Cli;

    fn parse(file: &str, args: &[&str]) -> clap::ArgMatches {
        let command = lay_text(with_environment(Cli::command()), &Cli::command(), file).unwrap();
        let mut matches = command.try_get_matches_from(args).unwrap();
        while let Some((_, below)) = matches.remove_subcommand() {
            matches = below;
        }
        matches
    }

    fn refused(file: &str) -> String {
        let error = lay_text(with_environment(Cli::command()), &Cli::command(), file).unwrap_err();
        format!("{error:#}")
    }

    #[test]
    fn a_flag_beats_the_file_and_a_commands_own_table_beats_the_shared_one() {
        let interval =
            |file: &str, args: &[&str]| *parse(file, args).get_one::<u64>("interval_secs").unwrap();
        let file = "[agent]\ninterval-secs = 7\n[agent.serve]\ninterval-secs = 9\n";
        assert_eq!(interval(file, &["mvm", "agent", "serve"]), 9);
        assert_eq!(interval(file, &["mvm", "doctor"]), 9);
        assert_eq!(interval(file, &["mvm", "agent", "serve", "--interval-secs", "11"]), 11);
        assert_eq!(interval("[agent]\ninterval-secs = 7\n", &["mvm", "agent", "serve"]), 7);
        assert_eq!(interval("", &["mvm", "agent", "serve"]), 30);
    }

    #[test]
    fn every_command_that_looks_at_the_agents_folder_finds_it_by_the_same_setting() {
        let file = "[agent]\ndata-dir = \"/srv/agent\"\nimages-dir = \"/srv/images\"\n";
        for command in [
            "agent serve",
            "agent reconcile --desired x",
            "agent observe",
            "agent desired",
            "agent certs status",
            "doctor",
            "image list",
            "image gc",
            "audit verify",
            "instance list",
            "events",
        ] {
            let words: Vec<&str> = ["mvm"].into_iter().chain(command.split(' ')).collect();
            let matches = parse(file, &words);
            let dir = matches.get_one::<PathBuf>("data_dir");
            assert_eq!(dir, Some(&PathBuf::from("/srv/agent")), "{command}");
            if let Ok(images) = matches.try_get_one::<PathBuf>("images_dir") {
                assert_eq!(images, Some(&PathBuf::from("/srv/images")), "{command}");
            }
        }
    }

    #[test]
    fn lists_and_switches_are_written_as_such() {
        let file = "quiet = \"on\"\n[agent]\nno-session = true\nsan = [\"a.example\", \"b.example\"]\n";
        let matches = parse(file, &["mvm", "agent", "serve"]);
        assert!(matches.get_flag("no_session") && matches.get_flag("quiet"));
        let names: Vec<&String> = matches.get_many("sans").unwrap().collect();
        assert_eq!(names, ["a.example", "b.example"]);
        assert!(
            refused("[agent]\nno-session = \"maybe\"").contains("[agent] no-session: use 1, true, yes or on")
        );
        assert!(refused("timeout = [\"1s\", \"2s\"]").contains("expected one value, found 2"));
    }

    #[test]
    fn what_is_no_setting_is_refused_with_what_was_probably_meant() {
        for (file, told) in [
            ("timeuot = \"3s\"", "timeuot is no setting: did you mean timeout?"),
            ("[agent]\ndata_dir = \"/x\"", "[agent] data_dir is no setting: did you mean data-dir?"),
            ("[agent.serve]\nintervall-secs = 3", "did you mean interval-secs?"),
            (
                "data-dir = \"/x\"",
                "data-dir is no setting: did you mean data-dir in [agent] or in [coordinator]?",
            ),
            ("[agent]\ntimeout = \"1m\"", "did you mean timeout at the top of the file?"),
            ("[agnet]", "[agnet] is no table of settings: did you mean [agent]?"),
            ("[agent]\nwhatever = 1", "[agent] whatever is no setting: docs/settings.md lists them"),
            ("[agent]\ninterval-secs = 0", "0 is not in 1..=86400"),
            ("timeout = \"soon\"", "invalid value 'soon' for '--timeout"),
            ("[agent]\nsan = [[1]]", "expected a string, a number or a boolean"),
        ] {
            assert!(refused(file).contains(told), "{file}: {}", refused(file));
        }
    }
}
