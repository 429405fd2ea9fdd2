//! This process's terminal, while a terminal in a guest takes its place: raw, and put back however the command ends.
//!
//! Raw means that every key goes to the guest, Ctrl-C too. What it was before is kept in one place of the process, so that
//! whatever ends it puts that back: the end of the command, an error, a panic, a signal.

use std::io::{self, IsTerminal as _};
use std::sync::{Mutex, Once, PoisonError};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

/// What the terminal was, while it is raw.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Whether standard input is a terminal.
pub(crate) fn is_input() -> bool {
    io::stdin().is_terminal()
}

/// Whether it is raw now.
pub(crate) fn is_raw() -> bool {
    BEFORE.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}

/// The terminal of standard input is raw until this is dropped.
#[derive(Debug)]
pub(crate) struct Raw(());

impl Raw {
    pub(crate) fn enter() -> io::Result<Self> {
        static PANICS: Once = Once::new();
        PANICS.call_once(|| {
            let told = std::panic::take_hook();
            // The report of the panic has to be readable.
            std::panic::set_hook(Box::new(move |panic| {
                restore();
                told(panic);
            }));
        });
        let before = tcgetattr(io::stdin())?;
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        let raw = Self(());
        raw.again()?;
        Ok(raw)
    }

    /// Makes it raw once more: a shell that stopped and continued this process has set it as it likes it.
    pub(crate) fn again(&self) -> io::Result<()> {
        let Some(mut modes) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).clone() else {
            return Ok(());
        };
        modes.make_raw();
        // What was typed already is typed for the guest.
        Ok(tcsetattr(io::stdin(), OptionalActions::Now, &modes)?)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// Puts the terminal back; where it is not raw nothing is done.
pub(crate) fn restore() {
    let before = match BEFORE.try_lock() {
        Ok(mut before) => before.take(),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner().take(),
        // Another thread is just about to.
        Err(std::sync::TryLockError::WouldBlock) => None,
    };
    if let Some(before) = before {
        // What is still to be written was written for a raw terminal.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &before);
    }
}
