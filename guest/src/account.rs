//! As whom the workload or an exec runs: a user of this machine, by its `/etc/passwd` and `/etc/group`.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::process::{Child, Command};
use std::thread;

use rustix::process::{Gid, Uid, getegid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::limits;
use crate::protocol::workload_override::User;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The other groups that it is in.
    groups: Vec<u32>,
    pub(crate) home: String,
}

impl Account {
    /// The user that is meant. `etc` has `passwd` and `group`.
    pub(crate) fn find(user: &User, etc: &Path) -> Result<Self, String> {
        let read = |name: &str| match fs::read(etc.join(name)) {
            Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            Err(error) => Err(format!("{}: {error}", etc.join(name).display())),
        };
        Self::among(user, &read("passwd")?, &read("group")?)
    }

    fn among(user: &User, passwd: &str, group: &str) -> Result<Self, String> {
        let is_meant = |fields: &&Vec<&str>| match user {
            User::Name(name) => fields[0] == name,
            User::Id(id) => fields[2].parse() == Ok(*id),
        };
        let lines: Vec<Vec<&str>> = lines(passwd, 7).collect();
        let (uid, gid, name, home) = match (lines.iter().find(is_meant), user) {
            (Some(fields), _) => {
                let number =
                    |field: &str| field.parse::<u32>().map_err(|_| format!("{field:?} is no number"));
                let told = |why| format!("user {} in /etc/passwd: {why}", fields[0]);
                let (uid, gid) = (number(fields[2]).map_err(told)?, number(fields[3]).map_err(told)?);
                (uid, gid, Some(fields[0]), fields[5])
            }
            (None, User::Name(name)) => return Err(format!("user {name} is not in the guest's /etc/passwd")),
            // No one's group: the same number, as where every user has a group of its own.
            (None, User::Id(id)) => (*id, *id, None, ""),
        };
        let is_in = |fields: &Vec<&str>| name.is_some_and(|name| fields[3].split(',').any(|one| one == name));
        let groups =
            lines_of_group(group).filter(is_in).filter_map(|fields| fields[2].parse().ok()).collect();
        let home = if home.starts_with('/') { home } else { "/" };
        Ok(Self { uid, gid, groups, home: home.to_owned() })
    }

    /// Starts the program as this user.
    pub(crate) fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        if (geteuid().as_raw(), getegid().as_raw()) == (self.uid, self.gid) {
            return command.spawn();
        }
        // Who a thread is passes on to what it starts. This one ends with that, so that no other is ever anyone else.
        thread::scope(|scope| {
            let become_and_spawn = || {
                let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
                let groups: Vec<Gid> = self.groups.iter().copied().map(Gid::from_raw).collect();
                set_thread_groups(&groups)?;
                set_thread_res_gid(gid, gid, gid)?;
                set_thread_res_uid(uid, uid, uid)?;
                command.spawn()
            };
            let thread = thread::Builder::new().name("start".to_owned()).stack_size(limits::STACK_BYTES);
            let started = thread.spawn_scoped(scope, become_and_spawn)?;
            started.join().unwrap_or_else(|_| Err(io::Error::other("the thread that starts it ended")))
        })
    }

    /// Lets the user make files in a folder, and lets it neither remove nor replace those of others there.
    pub(crate) fn may_write(&self, folder: &Path) -> io::Result<()> {
        chown(folder, None, Some(self.gid))?;
        fs::set_permissions(folder, fs::Permissions::from_mode(0o1775))
    }

    /// Makes a folder the user's own, but for what is in it.
    pub(crate) fn own(&self, folder: &Path) -> io::Result<()> {
        chown(folder, Some(self.uid), Some(self.gid))
    }
}

/// The lines of a file of fields that have at least so many.
fn lines(text: &str, fields: usize) -> impl Iterator<Item = Vec<&str>> {
    text.lines().map(|line| line.split(':').collect::<Vec<_>>()).filter(move |found| found.len() >= fields)
}

fn lines_of_group(text: &str) -> impl Iterator<Item = Vec<&str>> {
    lines(text, 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n# a comment\nbroken\n\
                          app:x:1000:1001:An app,,,:/srv/app:/bin/false\nodd:x:what:5::/:/bin/sh\n\
                          homeless:x:7:8:::/bin/sh\n";
    const GROUP: &str =
        "root:x:0:\nkvm:x:36:other,app\napps:x:1001:\ndisk:x:6:app\nhalf:x:9:ap,apps\nbad:x::app\n";

    fn account(user: &User) -> Result<Account, String> {
        Account::among(user, PASSWD, GROUP)
    }

    #[test]
    fn a_user_is_found_by_name_or_number_with_its_groups() {
        let app = Account { uid: 1000, gid: 1001, groups: vec![36, 6], home: "/srv/app".to_owned() };
        assert_eq!(account(&User::Name("app".to_owned())), Ok(app.clone()));
        assert_eq!(account(&User::Id(1000)), Ok(app));
        let nobodys = Account { uid: 5000, gid: 5000, groups: Vec::new(), home: "/".to_owned() };
        assert_eq!(account(&User::Id(5000)), Ok(nobodys));
        assert_eq!(account(&User::Name("homeless".to_owned())).unwrap().home, "/");
        assert_eq!(account(&User::Id(0)).unwrap().home, "/root");
    }

    #[test]
    fn a_name_that_is_not_there_or_has_no_number_is_told() {
        let why = |name: &str| account(&User::Name(name.to_owned())).unwrap_err();
        assert_eq!(why("nobody"), "user nobody is not in the guest's /etc/passwd");
        assert_eq!(why("odd"), "user odd in /etc/passwd: \"what\" is no number");
        assert_eq!(why("broken"), "user broken is not in the guest's /etc/passwd");
        let none = tempfile::tempdir().unwrap();
        assert!(Account::find(&User::Name("root".to_owned()), none.path()).is_err());
        assert_eq!(Account::find(&User::Id(3), none.path()).unwrap().gid, 3);
    }
}
