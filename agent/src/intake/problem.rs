//! The code, the status and the remediation of each refusal of the node's, whichever way it was asked.

use mvm_image::ImageError;
use mvm_proto::Problem;
use mvm_proto::text::chain;
use mvm_vmm::DriverError;

use crate::execute::StepError;
use crate::instance::records::StateError;
use crate::node::error::{ActionError, MoveError};

const FREE_SOME: &str = "Free some of it first.";

impl From<&ActionError> for Problem {
    fn from(error: &ActionError) -> Self {
        let (status, code, remediation) = match error {
            ActionError::Unknown(_) => (404, "unknown_instance", "List the tenant's instances."),
            ActionError::Busy(_) => (503, "instance_busy", "Try again."),
            ActionError::Illegal { phase, hint, .. } => {
                let remediation = format!("For one that is {phase}: {hint}.");
                return Self::new(409, "illegal_move", chain(error), remediation);
            }
            ActionError::Moving { .. } => {
                (409, "instance_moving", "Ask again in a moment: by then it is on one node or the other.")
            }
            ActionError::Asleep { .. } => (409, "asleep", "Wake it first, or ask in a way that may wake it."),
            ActionError::NoSpec { .. } => (409, "unmanaged_pool", "Push a document that names the pool."),
            ActionError::NotVouched { .. } => {
                let remediation = "Vouch for the image again, or push a document with another one.";
                (409, "image_not_vouched", remediation)
            }
            ActionError::SecretsChanged { .. } => {
                let remediation = "Put the bundle back that it was started with; or push a document with the new bundle's digest \
                                   as secrets_hash, which replaces the tenant's instances.";
                (409, "secrets_changed", remediation)
            }
            ActionError::SecretsMissing { .. } => {
                (409, "secrets_missing", "Put the tenant's bundle into the agent's secrets directory.")
            }
            ActionError::NotReady { .. } => {
                (409, "not_ready", "The condition of that name in `mvm node stats` says what is missing.")
            }
            ActionError::NoRoom { .. } => (409, "no_room", FREE_SOME),
            ActionError::NotRecorded(_) => (507, "storage_failed", "Free some disk space."),
            ActionError::Step { .. } | ActionError::Aborted { .. } => {
                (503, "action_failed", "Look at the instance's reason and console.")
            }
            ActionError::WindowTooLong => (400, "bad_body", "Ask for a shorter window."),
            ActionError::NoConsole { .. } => (503, "no_console", "An instance that never booted has none."),
        };
        Self::new(status, code, chain(error), remediation)
    }
}

impl From<ActionError> for Problem {
    fn from(error: ActionError) -> Self {
        Self::from(&error)
    }
}

impl From<MoveError> for Problem {
    fn from(error: MoveError) -> Self {
        let (status, code, remediation) = match &error {
            MoveError::Action(error) => return error.into(),
            MoveError::Immovable { .. } => (409, "immovable", "Use a node whose driver can move instances."),
            MoveError::NotSleeping(id, _) => {
                let remediation = format!("Put it to sleep first: mvm instance sleep {id}.");
                return Self::new(409, "not_sleeping", chain(&error), remediation);
            }
            MoveError::OtherDriver { .. } => {
                (409, "other_driver", "Import it on a node with the same driver.")
            }
            MoveError::OtherNetwork { .. } => {
                let remediation = "Give the tenant the same tenant_net_id and ipv4_subnet on both nodes.";
                (409, "other_network", remediation)
            }
            MoveError::NoImage { flake_ref, cause, .. } => {
                let remediation = format!(
                    "Get the same image first: mvm image build {flake_ref}, or `mvm image import` of a folder that the \
                     other node exported."
                );
                let code = match cause {
                    StepError::Image(ImageError::Missing(_)) => "image_missing",
                    _ => "image_unusable",
                };
                return Self::new(409, code, chain(&error), remediation);
            }
            MoveError::NotMoving(_) => (409, "not_moving", "`mvm drain` begins such moves by itself."),
            MoveError::NoTicket => {
                (403, "no_ticket", "Ask for the move again: each try has a ticket of its own.")
            }
            MoveError::NotExpected { .. } => (409, "not_expected", "Ask for the move again."),
            MoveError::Claimed(_) => (409, "claimed", "Wait until its claim ends."),
            MoveError::NotRecorded(..) => (507, "storage_failed", "Free some disk space."),
            MoveError::NotExported(_) => {
                let remediation = "Export it again, or remove it with `mvm instance stop` and `destroy`.";
                (409, "not_exported", remediation)
            }
            MoveError::BadArchive(_) | MoveError::Step { cause: StepError::Archive(_), .. } => {
                (422, "bad_archive", "Export the instance again, and copy the file whole.")
            }
            MoveError::Taken(cause) => taken(cause),
            MoveError::Step { cause, .. } => unfit(cause),
            MoveError::Unread { .. } | MoveError::Aborted(_) => MOVE_FAILED,
        };
        Self::new(status, code, chain(&error), remediation)
    }
}

type Answer = (u16, &'static str, &'static str);

const MOVE_FAILED: Answer = (503, "move_failed", "Look at the agent's log, then try again.");

fn taken(error: &StateError) -> Answer {
    match error {
        StateError::Closing => (503, "closing", "Try again once the agent is back; nothing was imported."),
        StateError::Exists(_) => {
            (409, "instance_exists", "It may have been imported before: mvm instance list.")
        }
        StateError::AddressTaken { .. } => {
            (409, "address_taken", "Move or destroy the instance that has it, or import elsewhere.")
        }
        _ => (507, "storage_failed", "Free some disk space."),
    }
}

/// Why a step between archive and driver did not succeed.
fn unfit(error: &StepError) -> Answer {
    match error {
        StepError::NoRoom(_) => (409, "no_room", FREE_SOME),
        StepError::State(_) => (507, "storage_failed", "Free some disk space."),
        StepError::Driver(
            DriverError::Unusable { .. } | DriverError::NoSnapshot { .. } | DriverError::OtherRevision { .. },
        ) => {
            let remediation =
                "Use a node with the same QEMU, processor, kernel and image, or start the instance anew.";
            (409, "snapshot_unusable", remediation)
        }
        StepError::Driver(DriverError::Key { .. }) => {
            let remediation =
                "Put the tenant's key from the other node into this one's secrets directory first.";
            (409, "key_missing", remediation)
        }
        _ => MOVE_FAILED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_shuts_down_takes_nothing_in_and_says_so() {
        let problem = Problem::from(MoveError::Taken(StateError::Closing));
        assert_eq!((problem.status, problem.code.as_str()), (503, "closing"));
        assert_eq!(problem.detail, "this agent is shutting down");
    }
}
