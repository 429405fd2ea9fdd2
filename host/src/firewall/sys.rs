//! What nftnl lacks, on libnftnl: expressions with any fields and registers, and messages that it has no type for.
#![allow(unsafe_code, reason = "nftnl's own traits for expressions and messages are made of raw pointers")]

use std::alloc::{Layout, handle_alloc_error};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{self, NonNull};

use nftnl::expr::Expression;
use nftnl::{MsgType, NlMsg, ProtoFamily, Rule};
use nftnl_sys::{self as sys, libc};

use super::wire::{HEADER_BYTES, Writer};

/// An expression by its name and its fields, numbered as in libnftnl.
pub(super) struct RawExpression {
    pub(super) name: &'static CStr,
    pub(super) fields: Vec<(u32, Field)>,
}

pub(super) enum Field {
    Number(u32),
    Text(CString),
    Data(Vec<u8>),
}

impl Expression for RawExpression {
    fn to_expr(&self, _: &Rule<'_>) -> NonNull<sys::nftnl_expr> {
        // SAFETY: the name ends with a zero.
        let expression = unsafe { sys::nftnl_expr_alloc(self.name.as_ptr()) };
        let Some(expression) = NonNull::new(expression) else { handle_alloc_error(Layout::new::<u8>()) };
        for (number, field) in &self.fields {
            let number = *number as u16;
            // SAFETY: the expression is alive and ours until it is given to the rule; libnftnl copies what it is given.
            unsafe {
                match field {
                    Field::Number(value) => sys::nftnl_expr_set_u32(expression.as_ptr(), number, *value),
                    Field::Text(text) => {
                        sys::nftnl_expr_set_str(expression.as_ptr(), number, text.as_ptr());
                    }
                    Field::Data(data) => {
                        let length = data.len() as u32;
                        sys::nftnl_expr_set(expression.as_ptr(), number, data.as_ptr().cast(), length);
                    }
                }
            }
        }
        expression
    }
}

/// A message of a batch whose attributes were written by us.
pub(super) struct RawMessage {
    pub(super) message: i32,
    pub(super) family: ProtoFamily,
    pub(super) flags: i32,
    attributes: Writer,
}

impl RawMessage {
    /// Nothing for attributes that could not fit the room which a batch has for a message.
    pub(super) fn new(message: i32, family: ProtoFamily, flags: i32, attributes: Writer) -> Option<Self> {
        let fits = attributes.as_bytes().len() + HEADER_BYTES <= usize::from(u16::MAX);
        fits.then_some(Self { message, family, flags, attributes })
    }
}

// SAFETY: `new` takes no more than 65,535 bytes with the header, and a batch has a page more than that for each message.
unsafe impl NlMsg for RawMessage {
    unsafe fn write(&self, buffer: *mut c_void, sequence: u32, _: MsgType) {
        let attributes = self.attributes.as_bytes();
        let (message, family) = (self.message as u16, self.family as u16);
        let flags = (self.flags | libc::NLM_F_ACK) as u16;
        let start = buffer.cast::<c_char>();
        // SAFETY: the caller's buffer has room for the largest message, of which this is the header and then the rest;
        // both are within it, and nothing of ours lies in it.
        unsafe {
            let header = sys::nftnl_nlmsg_build_hdr(start, message, family, flags, sequence);
            ptr::copy_nonoverlapping(attributes.as_ptr(), start.add(HEADER_BYTES).cast(), attributes.len());
            (*header).nlmsg_len = (HEADER_BYTES + attributes.len()) as u32;
        }
    }
}
