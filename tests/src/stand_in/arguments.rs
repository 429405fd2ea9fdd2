//! Firecracker's command line, and what a test asks of the stand-in by its environment.

use std::time::Duration;

use super::written::Level;

/// What the real one prints for `--snapshot-version`.
pub const SNAPSHOT_VERSION: &str = "v10.0.0";

const DEFAULT_VERSION: &str = "1.16.1";
pub(super) const NO_GUEST: &str = "no-guest";
const DEFAULT_PAYLOAD: usize = 51_200;

/// How often the real one flushes its metrics, and what a test that can't wait says instead.
const METRICS_EVERY: Duration = Duration::from_secs(60);
pub const METRICS_MS: &str = "STAND_IN_METRICS_MS";

/// The stand-in's own argument: be the guest of the stand-in that started this.
pub const BE_THE_GUEST: &str = "--be-the-guest";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    CrashAtStart,
    HangBeforeSocket,
    DieInSnapshot,
    DieInLoad,
    /// Writing a snapshot takes until it is let on, and nobody is answered meanwhile.
    SlowSnapshot,
    /// The guest does not hear Ctrl+Alt+Del.
    Deaf,
    /// Writing a snapshot fails for want of space.
    DiskFull,
    /// The guest's drivers and program never come up.
    NoGuest,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arguments {
    pub id: String,
    pub api_sock: String,
    pub max_payload: usize,
    /// Whose bugs it has.
    pub version: String,
    /// What it says it is: the same, unless a test has it lie.
    pub says: String,
    pub fault: Option<Fault>,
    /// TAPs that another process holds.
    pub busy_taps: Vec<String>,
    pub log_path: Option<String>,
    pub level: Option<Level>,
    /// Between two lines of metrics that nobody asked for.
    pub metrics_every: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    Run(Arguments),
    Guest { parent: i32 },
    Print(String),
}

/// Reads the command line and, for what only a test wants, the environment.
pub fn parse(words: &[String]) -> Result<Asked, String> {
    let variable = |name: &str| std::env::var(name).ok();
    parse_with(words, &variable)
}

fn parse_with(words: &[String], variable: &dyn Fn(&str) -> Option<String>) -> Result<Asked, String> {
    let version = variable("STAND_IN_VERSION").unwrap_or_else(|| DEFAULT_VERSION.to_owned());
    let mut arguments = Arguments {
        id: "anonymous-instance".to_owned(),
        api_sock: "/run/firecracker.socket".to_owned(),
        max_payload: DEFAULT_PAYLOAD,
        fault: variable("STAND_IN_FAULT").map(|name| fault(&name)).transpose()?,
        busy_taps: variable("STAND_IN_BUSY_TAPS")
            .map(|list| list.split(',').map(str::to_owned).collect())
            .unwrap_or_default(),
        log_path: None,
        level: None,
        metrics_every: variable(METRICS_MS)
            .and_then(|ms| ms.parse().ok())
            .map_or(METRICS_EVERY, Duration::from_millis),
        says: variable("STAND_IN_SAYS").unwrap_or_else(|| version.clone()),
        version,
    };
    let mut words = words.iter().flat_map(|word| match word.split_once('=') {
        Some((name, value)) if name.starts_with("--") => vec![name.to_owned(), value.to_owned()],
        _ => vec![word.clone()],
    });
    while let Some(word) = words.next() {
        match word.as_str() {
            BE_THE_GUEST => {
                let parent = words.next().and_then(|word| word.parse().ok());
                return parent
                    .map(|parent| Asked::Guest { parent })
                    .ok_or_else(|| format!("{BE_THE_GUEST} of whom?"));
            }
            "--version" => return Ok(Asked::Print(format!("Firecracker v{}\n", arguments.says))),
            "--snapshot-version" => return Ok(Asked::Print(SNAPSHOT_VERSION.to_owned())),
            "--no-seccomp" | "--boot-timer" | "--show-level" | "--show-log-origin" | "--enable-pci" => {}
            name => {
                let value = words.next().ok_or_else(|| format!("the argument {name} needs a value"))?;
                match name {
                    "--id" => arguments.id = checked_id(value)?,
                    "--api-sock" => arguments.api_sock = value,
                    "--http-api-max-payload-size" => {
                        arguments.max_payload = value.parse().map_err(|_| "payload size must be a number")?;
                    }
                    "--log-path" => arguments.log_path = Some(value),
                    "--level" => arguments.level = Some(Level::parse(&value)?),
                    "--module"
                    | "--metrics-path"
                    | "--seccomp-filter"
                    | "--start-time-us"
                    | "--start-time-cpu-us"
                    | "--parent-cpu-time-us"
                    | "--mmds-size-limit" => {}
                    _ => {
                        return Err(format!(
                            "Arguments parsing error: Found argument '{name}' which wasn't expected"
                        ));
                    }
                }
            }
        }
    }
    Ok(Asked::Run(arguments))
}

fn checked_id(id: String) -> Result<String, String> {
    let valid = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if (1..=64).contains(&id.len()) && id.chars().all(valid) {
        return Ok(id);
    }
    Err(format!("Invalid instance ID: {id}"))
}

fn fault(name: &str) -> Result<Fault, String> {
    Ok(match name {
        "crash-at-start" => Fault::CrashAtStart,
        "hang-before-socket" => Fault::HangBeforeSocket,
        "die-in-snapshot" => Fault::DieInSnapshot,
        "die-in-load" => Fault::DieInLoad,
        "slow-snapshot" => Fault::SlowSnapshot,
        "deaf" => Fault::Deaf,
        "disk-full" => Fault::DiskFull,
        NO_GUEST => Fault::NoGuest,
        other => return Err(format!("there is no fault {other}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(words: &[&str]) -> Result<Asked, String> {
        parse_with(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>(), &|_| None)
    }

    #[test]
    fn the_command_line_is_firecrackers() {
        assert_eq!(asked(&["--version"]), Ok(Asked::Print("Firecracker v1.16.1\n".into())));
        assert_eq!(asked(&["--snapshot-version"]), Ok(Asked::Print("v10.0.0".into())));
        let Ok(Asked::Run(arguments)) =
            asked(&["--id", "i-0000002a", "--api-sock=api.sock", "--no-seccomp", "--level", "Info"])
        else {
            panic!("it runs");
        };
        assert_eq!((arguments.id.as_str(), arguments.api_sock.as_str()), ("i-0000002a", "api.sock"));
        assert!(asked(&["--id", "i_1"]).is_err() && asked(&["--id", &"a".repeat(65)]).is_err());
        assert!(asked(&["--what"]).is_err() && asked(&["--what", "ever"]).is_err());
    }
}
