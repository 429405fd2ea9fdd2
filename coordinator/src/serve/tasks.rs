//! The loops beside the listeners. Each runs until shutdown; one that ends before is an error with its name, because
//! a coordinator that no longer renews, reissues or writes down looks healthy until it is too late.

use std::collections::HashMap;

use tokio::task::{Id, JoinError, JoinSet};

use crate::error::BoxError;

#[derive(Default)]
pub(super) struct Tasks {
    running: JoinSet<Result<(), BoxError>>,
    names: HashMap<Id, &'static str>,
}

impl Tasks {
    pub(super) fn spawn(
        &mut self,
        name: &'static str,
        task: impl Future<Output = Result<(), BoxError>> + Send + 'static,
    ) {
        let id = self.running.spawn(task).id();
        self.names.insert(id, name);
    }

    /// Waits for the next to end: its name, and why. `None` once none is left.
    pub(super) async fn ended(&mut self) -> Option<(&'static str, Result<(), BoxError>)> {
        let ended = self.running.join_next_with_id().await?;
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let name = self.names.remove(&id).unwrap_or("task");
        Some((name, ended.map_or_else(|panic| Err(panic.into()), |(_, result)| result)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_ends_or_panics_is_told_by_its_name() {
        let mut tasks = Tasks::default();
        tasks.spawn("lasting", std::future::pending());
        tasks.spawn("returning", async { Ok(()) });
        assert!(matches!(tasks.ended().await, Some(("returning", Ok(())))));
        tasks.spawn("failing", async { Err("no".into()) });
        assert!(matches!(tasks.ended().await, Some(("failing", Err(cause))) if cause.to_string() == "no"));
        tasks.spawn("panicking", async { panic!("a bug") });
        let (name, cause) = tasks.ended().await.unwrap();
        assert!(name == "panicking" && cause.unwrap_err().to_string().contains("a bug"));
    }
}
