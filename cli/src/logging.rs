//! Where log lines go: stderr, as text or as one JSON object a line. Standard output is for results only.
//!
//! Values may hold a peer's text. Both forms escape what would act on a terminal or begin a line of its own.

use std::fmt;
use std::io::{self, Write};

use mvm_proto::text;
use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::global::{Global, LogFormat};
use crate::output;

/// The longest value of a field; what is larger is data and no log.
const MAX_VALUE_BYTES: usize = 16 * 1024;

pub(crate) fn start(global: &Global) {
    let filter = EnvFilter::try_new(&global.log_level).unwrap_or_else(|_| EnvFilter::new("info"));
    let subscriber = subscriber(global.log_format, filter, output::has_color(), output::log);
    // Starting twice can only happen in tests of this module; the first one stays.
    let _ = subscriber.try_init();
}

fn subscriber<W>(
    format: LogFormat,
    filter: EnvFilter,
    color: bool,
    writer: W,
) -> Box<dyn tracing::Subscriber + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(color);
    match format {
        LogFormat::Text => {
            Box::new(builder.fmt_fields(debug_fn(write_field).delimited(" ")).with_writer(writer).finish())
        }
        LogFormat::Json => {
            Box::new(builder.json().flatten_event(true).with_writer(SafeJson(writer)).finish())
        }
    }
}

fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let value = text::one_line(&format!("{value:?}"), MAX_VALUE_BYTES);
    match field.name() {
        "message" => write!(writer, "{value}"),
        // Where a line of the crate `log` came from is told in the line's head.
        name if name.starts_with("log.") => Ok(()),
        name => write!(writer, "{}={value}", name.strip_prefix("r#").unwrap_or(name)),
    }
}

/// Escapes what JSON leaves as it is.
struct SafeJson<W>(W);

impl<'a, W: MakeWriter<'a>> MakeWriter<'a> for SafeJson<W> {
    type Writer = SafeJson<W::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        SafeJson(self.0.make_writer())
    }
}

impl<W: Write> Write for SafeJson<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.write_all(text::json(&String::from_utf8_lossy(line)).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_peers_text_in_a_log_line_stays_in_it_and_does_nothing() {
        let hostile = "x\x1b[2J\u{9b}31m\u{202e}\n2026-01-01 ERROR all keys are lost\r";
        for format in [LogFormat::Text, LogFormat::Json] {
            let kept = Kept::default();
            let writer = kept.clone();
            let subscriber = subscriber(format, EnvFilter::new("info"), false, move || writer.clone());
            tracing::subscriber::with_default(subscriber, || {
                let _span = tracing::info_span!("peer", name = %hostile).entered();
                tracing::warn!(reason = %hostile, other = hostile, "refused: {hostile}");
            });
            let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
            assert_eq!(text.lines().count(), 1, "{text}");
            assert!(text.trim_end().chars().all(text::is_printable), "{text}");
            assert!(text.contains("refused: x") && text.contains("all keys are lost"), "{text}");
        }
    }
}
