//! Asks the user whether a command shall go on.

use std::io::{BufRead as _, IsTerminal as _};

use anyhow::{Context as _, anyhow};

use crate::exit::{Outcome, Run};
use crate::progress::Progress;

/// What is asked, and what to say where the answer is no.
pub(crate) struct Question<'a> {
    /// `Push it all the same?`
    pub(crate) text: &'a str,
    /// `nothing was pushed`
    pub(crate) undone: &'a str,
    /// What to do where there is no terminal to ask on.
    pub(crate) advice: &'a str,
}

/// Tells `what` and asks on a terminal. Without a terminal only a flag can confirm: `advice` names it.
pub(crate) fn confirm(what: &str, question: &Question<'_>) -> Run {
    let Question { text, undone, advice } = question;
    let mut stdin = std::io::stdin().lock();
    if !stdin.is_terminal() {
        let told = if what.is_empty() { String::new() } else { format!("{what}\n") };
        return Err(Outcome::Usage(anyhow!("{told}{undone}: there is no terminal to ask on; {advice}")));
    }
    let show = Progress::new(false);
    if !what.is_empty() {
        show.say(what);
    }
    show.say(format!("{text} Type yes:"));
    let mut answer = String::new();
    stdin.read_line(&mut answer).context("could not read the answer")?;
    if answer.trim() == "yes" { Ok(()) } else { Err(anyhow!("not confirmed; {undone}").into()) }
}
