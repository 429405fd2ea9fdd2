//! Rules across fields.
use super::DesiredState;
use crate::FieldError;

pub(super) fn pools_without_image_digest(_desired: &DesiredState) -> Vec<FieldError> {
    todo!()
}
