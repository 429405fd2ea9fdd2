//! The terminal of an exec: made here, and given to the program as its standard files and as what controls its session.
//!
//! The guest keeps both ends. Its own is read and written like pipes are; the program's stays open here until the program
//! has ended, for without any such end the other one can't be read. When the guest lets go of its own end, the kernel hangs up.
#![allow(unsafe_code, reason = "only the child can begin the session that its terminal controls")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use nix::fcntl::OFlag;
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::process::{Pid, ioctl_tiocsctty, setsid};
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Winsize, tcgetattr, tcgetpgrp, tcsetattr,
    tcsetwinsize,
};

use crate::protocol;

/// What a terminal is unless its request says otherwise.
const ROWS: u16 = 24;
const COLUMNS: u16 = 80;
pub(super) const TERM: &str = "xterm";

#[derive(Debug)]
pub(super) struct Terminal {
    /// The guest's end.
    ours: OwnedFd,
    /// The program's end, until that has ended.
    its: Option<OwnedFd>,
}

impl Terminal {
    pub(super) fn open(asked: &protocol::Terminal) -> io::Result<Self> {
        // Nothing that another thread starts meanwhile may inherit either end: it would keep the terminal from being hung up.
        let ours = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)?;
        grantpt(&ours)?;
        unlockpt(&ours)?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let its = rustix::fs::open(ptsname_r(&ours)?, flags, Mode::empty())?;
        let ours = ours.as_fd().try_clone_to_owned()?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        let mut modes = tcgetattr(&its)?;
        // What is erased is a character, not a byte.
        modes.input_modes |= InputModes::IUTF8;
        tcsetattr(&its, OptionalActions::Now, &modes)?;
        let terminal = Self { ours, its: Some(its) };
        terminal.resize(asked.rows, asked.columns)?;
        Ok(terminal)
    }

    /// Lets a user open it by its name, as programs do.
    pub(super) fn own(&self, user: u32) -> io::Result<()> {
        if let Some(its) = &self.its {
            rustix::fs::fchown(its, Some(Uid::from_raw(user)), None::<Gid>)?;
        }
        Ok(())
    }

    /// Has the program begin a session that this terminal controls, with it as its standard files.
    pub(super) fn give_to(&self, command: &mut Command) -> io::Result<()> {
        let Some(its) = &self.its else { return Ok(()) };
        command.stdin(Stdio::from(its.try_clone()?));
        command.stdout(Stdio::from(its.try_clone()?)).stderr(Stdio::from(its.try_clone()?));
        let stdin = io::stdin();
        let begin_session = move || {
            setsid()?;
            ioctl_tiocsctty(stdin.as_fd())?;
            Ok(())
        };
        // SAFETY: the child makes two system calls; they allocate nothing and take no lock.
        unsafe { command.pre_exec(begin_session) };
        Ok(())
    }

    /// The guest's end, for reading or writing.
    pub(super) fn file(&self) -> io::Result<File> {
        Ok(File::from(self.ours.try_clone()?))
    }

    /// The kernel tells the programs in its foreground.
    pub(super) fn resize(&self, rows: u32, columns: u32) -> io::Result<()> {
        let size = |asked: u32, otherwise: u16| match asked {
            0 => otherwise,
            asked => u16::try_from(asked).unwrap_or(u16::MAX),
        };
        let size =
            Winsize { ws_row: size(rows, ROWS), ws_col: size(columns, COLUMNS), ws_xpixel: 0, ws_ypixel: 0 };
        Ok(tcsetwinsize(&self.ours, size)?)
    }

    /// The process group in its foreground: under a shell the command that runs, not the shell.
    pub(super) fn foreground(&self) -> Option<Pid> {
        tcgetpgrp(&self.ours).ok()
    }

    /// What ends the input of a program that reads lines; nothing for one that reads bytes, which has its own way to end.
    /// In the middle of a line the first one only hands over what there is of it.
    pub(super) fn end_of_input(&self, in_a_line: bool) -> Vec<u8> {
        match self.its.as_ref().map(tcgetattr) {
            Some(Ok(modes)) if modes.local_modes.contains(LocalModes::ICANON) => {
                vec![modes.special_codes[SpecialCodeIndex::VEOF]; if in_a_line { 2 } else { 1 }]
            }
            _ => Vec::new(),
        }
    }

    /// The program has ended: what it wrote can be read, and then there is an end.
    pub(super) fn program_ended(&mut self) {
        self.its = None;
    }
}
