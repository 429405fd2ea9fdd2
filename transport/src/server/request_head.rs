//! Refuses a request whose header fields HTTP/3 calls malformed, before the router sees it.
//!
//! Pseudo-header fields and the path are checked where they can still be seen as they were sent, in
//! `h3_streams::field_section`.

use http::{HeaderMap, Request, header};

/// What a request says about itself and HTTP/3 has other means for (RFC 9114, section 4.2).
const CONNECTION_HEADERS: [&str; 5] =
    ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"];

/// The length that a well-formed request announces for its body; what is wrong with another.
pub(super) fn announced_length(request: &Request<()>) -> Result<Option<u64>, &'static str> {
    let headers = request.headers();
    if CONNECTION_HEADERS.iter().any(|name| headers.contains_key(*name)) {
        return Err("HTTP/3 has no header fields about the connection");
    }
    if headers.get_all(header::TE).iter().any(|value| value != "trailers") {
        return Err("the only `te` of HTTP/3 is `trailers`");
    }
    if headers.get_all(header::HOST).iter().count() > 1 {
        return Err("`host` comes twice");
    }
    if request.uri().authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err("the authority names a user");
    }
    content_length(headers)
}

fn content_length(headers: &HeaderMap) -> Result<Option<u64>, &'static str> {
    let mut values = headers.get_all(header::CONTENT_LENGTH).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err("`content-length` comes twice");
    }
    // Digits alone: `parse` would take a plus sign too.
    let digits = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let length = digits.and_then(|digits| digits.parse().ok());
    length.map(Some).ok_or("`content-length` is not a length")
}
