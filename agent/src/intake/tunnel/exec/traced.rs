//! The part of a stream's trace that is in the guest: from the request to its program's end. The guest has nothing to do with it:
//! its program finds the context in the variable `TRACEPARENT`, where someone records the trace and the caller gave none, so that
//! what it calls can go on with the trace.

use mvm_proto::Problem;
use mvm_proto::trace::TRACEPARENT_VARIABLE;
use mvm_telemetry::{Attribute, Kind, Span, Tracer};

use crate::guest::ExecRequest;

/// Ends when the program does, or when its stream is lost.
pub(super) struct TracedGuest(Span);

impl TracedGuest {
    pub(super) fn begin(tracer: &Tracer, stream: &Span) -> Self {
        Self(tracer.begin(Kind::Client, "guest exec", stream.context()))
    }

    /// Tells the program where it belongs.
    pub(super) fn tell(&self, request: &mut ExecRequest) {
        if let Some(context) = self.0.sampled() {
            request.env.entry(TRACEPARENT_VARIABLE.to_owned()).or_insert_with(|| context.to_string());
        }
    }

    pub(super) fn ended(&mut self, code: i32, signal: u32) {
        if signal == 0 {
            self.0.set(Attribute::ExitCode, code);
        } else {
            self.0.set(Attribute::Signal, i64::from(signal));
        }
    }

    pub(super) fn fail(&mut self, problem: &Problem) {
        self.0.fail(&problem.code);
    }
}
