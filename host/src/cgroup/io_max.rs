//! What an instance may do to the disk: `io.max`, which has a line for each disk with a limit.
//!
//! Unlike an instance's other limits these change while it runs. What is set on another disk than the one that instances are
//! kept on was not asked for, and is removed.

use std::fs;
use std::io;

use mvm_proto::document::IoLimits;
use mvm_proto::text::chain;
use serde::{Deserialize, Serialize};

use super::disk::Disk;
use super::error::{CgroupError, failed};
use super::file::{self, Applied};
use super::group::{InstanceGroup, Repair};
use super::limits::Setting;
use super::{Cgroups, Mode, Tree};

const FILE: &str = "io.max";
const CONTROLLER: &str = "io";

/// What is found in a group's `io.max`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoFound {
    /// Nothing is limited, or nothing can be.
    #[default]
    Unlimited,
    Limited {
        disk: Disk,
        limits: IoLimits,
    },
    /// More than one disk is; mvm did not do that.
    Several,
    /// Something should be, and can't be.
    Unheld,
}

impl IoFound {
    /// Whether that is what is wanted.
    #[must_use]
    pub fn is(&self, wanted: Option<&IoLimits>) -> bool {
        match (self, wanted) {
            (Self::Unlimited, None) => true,
            (Self::Limited { limits, .. }, Some(wanted)) => limits == wanted,
            _ => false,
        }
    }

    pub(super) fn read(text: &str) -> Self {
        match parse(text)[..] {
            [] => Self::Unlimited,
            [(disk, limits)] => Self::Limited { disk, limits },
            _ => Self::Several,
        }
    }
}

/// The disks with a limit, and it.
fn parse(text: &str) -> Vec<(Disk, IoLimits)> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let disk = words.next()?.parse().ok()?;
        let mut limits = IoLimits::default();
        for (name, value) in words.filter_map(|word| word.split_once('=')) {
            // `max` is no number, and no limit.
            let value = value.parse().ok();
            match name {
                "rbps" => limits.read_bytes_per_second = value,
                "wbps" => limits.write_bytes_per_second = value,
                "riops" => limits.read_ops_per_second = value,
                "wiops" => limits.write_ops_per_second = value,
                _ => {}
            }
        }
        Some((disk, limits)).filter(|(_, limits)| *limits != IoLimits::default())
    };
    text.lines().filter_map(line).collect()
}

/// As the kernel writes it.
fn line(disk: Disk, limits: &IoLimits) -> String {
    let value = |limit: Option<u64>| limit.map_or("max".to_owned(), |limit| limit.to_string());
    format!(
        "{disk} rbps={} wbps={} riops={} wiops={}",
        value(limits.read_bytes_per_second),
        value(limits.write_bytes_per_second),
        value(limits.read_ops_per_second),
        value(limits.write_ops_per_second)
    )
}

/// What is to be written where this was found: what no other disk should have, then what ours should.
fn settings(found: &str, wanted: Option<(Disk, IoLimits)>) -> Vec<Setting> {
    let others = parse(found).into_iter().map(|(disk, _)| (disk, IoLimits::default()));
    let others = others.filter(|(disk, _)| wanted.is_none_or(|(ours, _)| ours != *disk));
    others.chain(wanted).map(|(disk, limits)| Setting::needed(FILE, line(disk, &limits))).collect()
}

impl Cgroups {
    /// What an instance may do to the disk from now on; `None`: all. A group that is not there has nothing to limit.
    pub fn ensure_io(
        &self,
        instance: &InstanceGroup,
        limits: Option<&IoLimits>,
    ) -> Result<Vec<Repair>, CgroupError> {
        let mut repairs = Vec::new();
        let Some(tree) = &self.tree else { return Ok(repairs) };
        if tree.directory(&instance.clone().into()).is_dir() {
            self.hold_io(tree, instance, limits, &mut repairs)?;
        } else {
            self.unheld_now().remove(instance);
        }
        Ok(repairs)
    }

    /// The same in a group that is there. Where it can't be held and need not be, that is remembered for as long as it is
    /// wanted.
    pub(super) fn hold_io(
        &self,
        tree: &Tree,
        instance: &InstanceGroup,
        limits: Option<&IoLimits>,
        repairs: &mut Vec<Repair>,
    ) -> Result<(), CgroupError> {
        let held = self.set_io(tree, instance, limits, repairs);
        let mut unheld = self.unheld_now();
        match held {
            Ok(()) => drop(unheld.remove(instance)),
            Err(cause) if self.mode == Mode::Required => return Err(cause),
            Err(cause) => drop(unheld.insert(instance.clone(), chain(&cause))),
        }
        Ok(())
    }

    fn set_io(
        &self,
        tree: &Tree,
        instance: &InstanceGroup,
        limits: Option<&IoLimits>,
        repairs: &mut Vec<Repair>,
    ) -> Result<(), CgroupError> {
        let has_controller = tree.controllers.contains(CONTROLLER);
        let wanted = match limits {
            None if !has_controller => return Ok(()),
            None => None,
            Some(_) if !has_controller => {
                let controllers = vec![CONTROLLER.to_owned()];
                return Err(CgroupError::Unavailable { controllers, group: tree.root.clone() });
            }
            Some(limits) => {
                let directory = self.disk_of.as_ref().ok_or_else(|| CgroupError::NoDisk {
                    directory: "the data directory".into(),
                    reason: "it was not named".to_owned(),
                })?;
                Some((self.machine.disk_of(directory)?, *limits))
            }
        };
        let (group, name) = (tree.directory(&instance.clone().into()), instance.to_string());
        let found = match fs::read_to_string(group.join(FILE)) {
            Ok(found) => found,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound && wanted.is_none() => return Ok(()),
            Err(cause) => return Err(failed(format!("read {FILE} of {name}"))(cause)),
        };
        for setting in settings(&found, wanted) {
            if let Applied::Changed { from } = file::apply(&group, &name, &setting, self.page_size)? {
                let (group, file) = (instance.clone().into(), FILE.to_owned());
                repairs.push(Repair::Set { group, file, from, to: setting.value });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Disk = Disk { major: 8, minor: 16 };

    fn writes(bytes: u64) -> IoLimits {
        IoLimits { write_bytes_per_second: Some(bytes), ..IoLimits::default() }
    }

    fn lines(found: &str, wanted: Option<IoLimits>) -> Vec<String> {
        let settings = settings(found, wanted.map(|limits| (OURS, limits)));
        settings.into_iter().map(|setting| setting.value).collect()
    }

    #[test]
    fn a_limit_is_written_as_the_kernel_shows_it_and_read_back_from_that() {
        let all = IoLimits {
            read_bytes_per_second: Some(1 << 20),
            write_bytes_per_second: Some(2 << 20),
            read_ops_per_second: None,
            write_ops_per_second: Some(100),
        };
        let text = line(OURS, &all);
        assert_eq!(text, "8:16 rbps=1048576 wbps=2097152 riops=max wiops=100");
        assert_eq!(IoFound::read(&format!("{text}\n")), IoFound::Limited { disk: OURS, limits: all });
    }

    #[test]
    fn what_is_limited_on_no_disk_or_on_two_is_told_apart_from_what_is_wanted() {
        let one = writes(1 << 20);
        let text = line(OURS, &one);
        assert_eq!(IoFound::read(""), IoFound::Unlimited);
        assert_eq!(IoFound::read("8:0 rbps=max wbps=max riops=max wiops=max\nodd\n"), IoFound::Unlimited);
        let two = format!("{text}\n8:0 rbps=7 wbps=max riops=max wiops=max\n");
        assert_eq!(IoFound::read(&two), IoFound::Several);
        assert!(IoFound::read("").is(None) && !IoFound::read("").is(Some(&one)));
        assert!(IoFound::read(&text).is(Some(&one)) && !IoFound::read(&text).is(Some(&writes(9))));
        // One that could not be held is tried again, and forgotten only by who tried.
        assert!(!IoFound::Unheld.is(None) && !IoFound::Unheld.is(Some(&one)));
        assert!(!IoFound::read(&text).is(None) && !IoFound::read(&two).is(Some(&one)));
    }

    #[test]
    fn unwanted_limits_are_removed_also_on_another_disk() {
        let (none, other) =
            ("rbps=max wbps=max riops=max wiops=max", "8:0 rbps=7 wbps=max riops=max wiops=max\n");
        assert_eq!(lines("", None), [""; 0]);
        assert_eq!(lines(other, None), [format!("8:0 {none}")]);
        let ours = line(OURS, &writes(1 << 20));
        assert_eq!(lines("", Some(writes(1 << 20))), [ours.as_str()]);
        assert_eq!(lines(other, Some(writes(1 << 20))), [format!("8:0 {none}"), ours.clone()]);
        assert_eq!(lines(&line(OURS, &writes(5)), Some(writes(1 << 20))), [ours.as_str()]);
        assert_eq!(lines(&ours, None), [format!("8:16 {none}")]);
    }
}
