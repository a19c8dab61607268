//! One file for one receiver, under a name that only the two know.

use std::path::Path;
use std::sync::Arc;

use d2tp_driver::Flow;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::sync::Notify;

use crate::serve::{DirectoryAccess, FileBody, FileService, HiddenFiles};

/// The last part of the path by which the receiver says that it has everything.
pub const DONE: &str = "done";

/// A file that is offered. Requests for anything else are answered with 404.
#[derive(Debug)]
pub struct OneFileService {
    files: FileService,
    /// The path of the file in the directory that is served.
    inside: Uri,
    token: String,
    /// Notified when the receiver has everything.
    pub done: Notify,
}

impl OneFileService {
    /// Offers the file at `path` under `/TOKEN/…`.
    ///
    /// # Errors
    /// There is no such directory, or its kernel cannot confine paths.
    pub fn new(path: &Path, token: &str) -> std::io::Result<OneFileService> {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        let name = percent_encoding::percent_encode(name, NON_ALPHANUMERIC);
        let inside = format!("/{name}").parse().map_err(std::io::Error::other)?;
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        Ok(OneFileService {
            files: FileService::new(folder, HiddenFiles::Served, DirectoryAccess::Refused)?,
            inside,
            token: token.to_owned(),
            done: Notify::new(),
        })
    }

    /// The path of a file of this name in the URL that the receiver asks for.
    pub fn path(token: &str, name: &str) -> String {
        format!(
            "/{token}/file/{}",
            utf8_percent_encode(name, NON_ALPHANUMERIC)
        )
    }

    /// The path by which the receiver says that it has everything.
    pub fn done_path(token: &str) -> String {
        format!("/{token}/{DONE}")
    }

    /// Answers the one request of a flow.
    pub async fn serve(self: Arc<Self>, flow: Flow) {
        let service = service_fn(move |request| {
            let service = self.clone();
            async move { Ok::<_, std::convert::Infallible>(service.answer(request).await) }
        });
        let served = http1::Builder::new()
            .keep_alive(false)
            .half_close(true)
            .serve_connection(TokioIo::new(flow), service)
            .await;
        if let Err(error) = served {
            tracing::info!(%error, "broken off");
        }
    }

    async fn answer(&self, mut request: Request<Incoming>) -> Response<FileBody> {
        let path = request.uri().path();
        let mut parts = path.trim_start_matches('/').split('/');
        match (parts.next(), parts.next()) {
            (Some(token), Some("file")) if token == self.token => {
                *request.uri_mut() = self.inside.clone();
                self.files.answer(&request).await
            }
            (Some(token), Some(DONE)) if token == self.token => {
                self.done.notify_one();
                nothing(StatusCode::NO_CONTENT)
            }
            _ => nothing(StatusCode::NOT_FOUND),
        }
    }
}

fn nothing(status: StatusCode) -> Response<FileBody> {
    let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer
}
