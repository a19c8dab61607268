//! What is asked of the tags of feeds and lists, whatever wrote them.

use quick_xml::events::BytesStart;

/// Whether a document type declares entities, which can expand without end.
pub fn declares_entities(doctype: &str) -> bool {
    doctype.to_ascii_uppercase().contains("<!ENTITY")
}

/// The value of an attribute, whatever the case of its name.
pub fn attribute(tag: &BytesStart<'_>, name: &str) -> Option<String> {
    let mut attributes = tag.attributes();
    // A second use of a name, as some exporters write it, is no reason to read nothing.
    attributes.with_checks(false);
    let is_named = |key: &str| key.eq_ignore_ascii_case(name);
    let found = attributes
        .filter_map(Result::ok)
        .find(|attribute| is_named(attribute.key.as_ref()))?;
    let value = quick_xml::escape::unescape(&found.value);
    // What is no escape stays as it is: a bare `&` of an address.
    Some(value.map_or_else(|_| found.value.to_string(), |value| value.into_owned()))
}

/// Whether this is HTML. A feed may begin with a comment or a byte order mark as well.
pub fn is_web_page(bytes: &[u8]) -> bool {
    let head = &bytes[..bytes.len().min(4096)];
    let head = String::from_utf8_lossy(head).to_lowercase();
    let head = head.trim_start_matches('\u{feff}').trim_start();
    let is_feed = ["<rss", "<feed", "<rdf:rdf"]
        .iter()
        .any(|root| head.contains(root));
    head.starts_with("<!doctype html")
        || head.starts_with("<html")
        || (head.contains("<html ") && !is_feed)
}
