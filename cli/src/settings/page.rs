//! `docs/settings.md`, made of the commands' own flags.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::{Command, CommandFactory as _};

use super::{AGENT, CLIENT, COORDINATOR, DEV, Setting, all, environment_name};
use crate::args::Cli;
use crate::paths::default_data_dir;

const HEAD: &str = r#"# Settings

Generated from the commands' flags in `cli/src`; a test fails when the two differ.

Every flag can also come from the environment or from a settings file: **flag beats environment beats context beats file**. A
context (`mvm context`) says `coordinator`, `operator-dir`, `tenant` and `node-endpoint` of `[client]`, for every command but `mvm agent`; contexts are in
`MVM_CONTEXTS`, else `$XDG_CONFIG_HOME/mvm/contexts.toml`, and `--context` or `MVM_CONTEXT` chooses one. The settings file is the first of
`--config FILE`, `MVM_CONFIG`, `$XDG_CONFIG_HOME/mvm/config.toml` (`~/.config/mvm/config.toml`) and `/etc/mvm/config.toml`; only one is
read. It has one form for all commands:

```toml
timeout = "1m"                       # every command
output = "json"

[agent]                              # this machine's agent, and every command that looks at its folder
data-dir = "/srv/mvm/agent"
cgroups = "best-effort"
san = ["n1.example", "192.0.2.7"]    # what can be repeated is a list

[coordinator]                        # this machine's coordinator
data-dir = "/srv/mvm/coordinator"

[client]                             # whom commands talk to, and as whom
coordinator = "https://c1.example:4433"
operator-dir = "/etc/mvm/alice"

[agent.serve]                        # one command alone; beats what it shares with others
interval-secs = 10
```

- A key is the flag without its dashes. Its environment name is made of table and key: `[agent] data-dir` is `MVM_AGENT_DATA_DIR`.
- `mvm doctor` has the settings of `mvm agent serve`, and judges what that would do with them.
- Switches are `1`, `true`, `yes` or `on`, or `0`, `false`, `no` or `off`. An empty variable counts as not set.
- A key or table that no command knows is an error that names the one that was probably meant; so is a value that the flag would refuse.
"#;

fn page(command: &Command) -> String {
    let mut tables: BTreeMap<String, BTreeMap<String, Setting>> = BTreeMap::new();
    for setting in all(command) {
        let table = tables.entry(setting.place.table.clone()).or_default();
        // Of a daemon's settings the command that runs it says it best; of whom clients talk to, one that is a client.
        let is_served = setting.command.ends_with(&["serve".to_owned()]);
        let is_better = if setting.place.table == CLIENT {
            table
                .get(&setting.place.key)
                .is_some_and(|known: &Setting| known.command.starts_with(&[AGENT.to_owned()]))
        } else {
            is_served
        };
        if is_better || !table.contains_key(&setting.place.key) {
            table.insert(setting.place.key.clone(), setting);
        }
    }
    let mut page = HEAD.to_owned();
    for (name, title) in [
        ("", "Every command"),
        (AGENT, "`[agent]`: this machine's agent"),
        (COORDINATOR, "`[coordinator]`: this machine's coordinator"),
        (CLIENT, "`[client]`: whom commands talk to"),
        (DEV, "`[dev]`: the cluster of `mvm dev`"),
    ] {
        page += &format!("\n## {title}\n\n");
        page += "| key | environment | default | |\n|---|---|---|---|\n";
        for setting in tables.remove(name).unwrap_or_default().values() {
            let (what, default) = told(setting);
            let (key, name) = (&setting.place.key, environment_name(&setting.place, &setting.arg));
            // Writing to a string can't fail.
            let _ = writeln!(page, "| `{key}` | `{name}` | {default} | {what} |");
        }
    }
    page += "\n## One command alone\n\n| table | key | environment | default | |\n|---|---|---|---|---|\n";
    for (table, settings) in tables {
        for (key, setting) in settings {
            let (what, default) = told(&setting);
            let name = environment_name(&setting.place, &setting.arg);
            let _ = writeln!(page, "| `[{table}]` | `{key}` | `{name}` | {default} | {what} |");
        }
    }
    page
}

/// What a setting is, and its default: as its help says, else as clap has it.
fn told(setting: &Setting) -> (String, String) {
    let help = setting.arg.get_help().map(ToString::to_string).unwrap_or_default();
    let escaped = |text: &str| text.replace('|', "\\|").replace('<', "\\<");
    if let Some((what, rest)) = help.split_once(" [default: ") {
        return (escaped(what), escaped(rest.trim_end_matches(']')));
    }
    let defaults: Vec<String> =
        setting.arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    let of_machine = [AGENT, COORDINATOR]
        .into_iter()
        .find(|part| defaults == [default_data_dir(part).to_string_lossy().into_owned()]);
    let default = match (of_machine, defaults.as_slice()) {
        (Some(part), _) => format!("`/var/lib/mvm/{part}` for root, else `~/.local/state/mvm/{part}`"),
        (None, []) if setting.is_switch() => "off".to_owned(),
        (None, []) => "-".to_owned(),
        (None, _) if setting.is_switch() => "off".to_owned(),
        (None, defaults) => format!("`{}`", defaults.join(" ")),
    };
    (escaped(&help), default)
}

#[test]
fn the_documentation_page_is_made_of_the_flags() {
    let made = page(&Cli::command());
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let found = std::fs::read_to_string(format!("{root}/docs/settings.md")).unwrap_or_default();
    if found != made {
        let fresh = format!("{root}/target/settings.md");
        std::fs::write(&fresh, &made).unwrap();
        assert_eq!(found, made, "copy target/settings.md to docs/settings.md");
    }
}
