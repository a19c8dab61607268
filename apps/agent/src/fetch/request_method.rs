//! The methods of requests: for objects, and for the folders of WebDAV servers (RFC 4918).

use http::{Method, StatusCode};

/// The method of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RequestMethod {
    /// Requests an object.
    #[default]
    Get,
    /// Requests the head of an object's answer alone.
    Head,
    /// Lists a folder: its files, their lengths and times.
    Propfind,
    /// Makes a folder.
    Mkcol,
    /// Deletes a file.
    Delete,
}

/// What is asked of each file and folder: whether it is a folder, its length, and when it was changed.
const LISTING_QUERY: &str = "<?xml version=\"1.0\" encoding=\"utf-8\"?>\
     <propfind xmlns=\"DAV:\"><prop><resourcetype/><getcontentlength/><getlastmodified/></prop></propfind>";

impl RequestMethod {
    /// The method in HTTP.
    pub fn in_http(self) -> Method {
        let webdav = |name: &'static [u8]| Method::from_bytes(name).expect("a method's name");
        match self {
            RequestMethod::Get => Method::GET,
            RequestMethod::Head => Method::HEAD,
            RequestMethod::Propfind => webdav(b"PROPFIND"),
            RequestMethod::Mkcol => webdav(b"MKCOL"),
            RequestMethod::Delete => Method::DELETE,
        }
    }

    /// The body of the request, as XML; mostly none.
    pub fn body(self) -> &'static str {
        match self {
            RequestMethod::Propfind => LISTING_QUERY,
            RequestMethod::Get
            | RequestMethod::Head
            | RequestMethod::Mkcol
            | RequestMethod::Delete => "",
        }
    }

    /// Whether the method asks for an object as it is, or for its head.
    pub fn is_of_objects(self) -> bool {
        matches!(self, RequestMethod::Get | RequestMethod::Head)
    }

    /// Whether redirects are followed: what changes the server changes it where the user said.
    pub fn follows_redirects(self) -> bool {
        !matches!(self, RequestMethod::Mkcol | RequestMethod::Delete)
    }

    /// Whether an answer with this status says that what the method is for is so. A request may be sent again after its
    /// answer was lost, so a folder that exists was made, and a file that is not there was deleted.
    pub fn is_fulfilled_by(self, status: StatusCode) -> bool {
        match self {
            RequestMethod::Get | RequestMethod::Head => status == StatusCode::OK,
            RequestMethod::Propfind => status == StatusCode::MULTI_STATUS,
            // RFC 4918 §9.3.1: MKCOL of what exists is refused with 405.
            RequestMethod::Mkcol => matches!(
                status,
                StatusCode::CREATED | StatusCode::OK | StatusCode::METHOD_NOT_ALLOWED
            ),
            RequestMethod::Delete => matches!(
                status,
                StatusCode::OK
                    | StatusCode::ACCEPTED
                    | StatusCode::NO_CONTENT
                    | StatusCode::NOT_FOUND
                    | StatusCode::GONE
            ),
        }
    }
}
