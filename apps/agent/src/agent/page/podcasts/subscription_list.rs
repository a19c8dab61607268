//! Lists of subscriptions (OPML) in and out.

use std::sync::Arc;

use askama::Template;
use axum::extract::multipart::MultipartError;
use axum::extract::{Multipart, State};
use axum::response::{IntoResponse, Response};
use cedos_text::escape_controls;
use http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};

use super::super::frame::{self, PageContext, PageFrame};
use super::library_access::frame_of;
use crate::fetch::outcome::TransferFailure;

/// Entries that were left out of an import and are shown.
const SKIPPED_SHOWN_MAX: usize = 50; // a guess

#[derive(Template)]
#[template(path = "podcasts_imported.html")]
struct ImportedPage {
    frame: PageFrame,
    base: Arc<str>,
    feeds: usize,
    skipped: Vec<String>,
    more_skipped: usize,
}

fn unreadable(error: &MultipartError) -> TransferFailure {
    TransferFailure::usage(format!(
        "The file did not arrive whole: {}",
        error.body_text()
    ))
}

async fn uploaded(form: &mut Multipart) -> Result<Vec<u8>, TransferFailure> {
    while let Some(field) = form
        .next_field()
        .await
        .map_err(|error| unreadable(&error))?
    {
        if field.name() == Some("file") {
            let bytes = field.bytes().await.map_err(|error| unreadable(&error))?;
            return Ok(bytes.into());
        }
    }
    let text = "No file was chosen: choose the OPML file that another program exported.";
    Err(TransferFailure::usage(text))
}

/// Subscribes to all feeds of an uploaded list.
pub(super) async fn import(State(context): State<PageContext>, mut form: Multipart) -> Response {
    let imported = async {
        context
            .agent
            .podcasts
            .import(uploaded(&mut form).await?)
            .await
    };
    match imported.await {
        Ok(import) => {
            let skipped = import.skipped.iter().take(SKIPPED_SHOWN_MAX);
            frame::html(&ImportedPage {
                frame: frame_of(&context),
                base: context.base.clone(),
                feeds: import.feeds,
                more_skipped: import.skipped.len().saturating_sub(SKIPPED_SHOWN_MAX),
                skipped: skipped
                    .map(|text| escape_controls(text).into_owned())
                    .collect(),
            })
        }
        Err(failure) => frame::problem(&context, &failure),
    }
}

/// Gives all subscriptions as a list for other programs.
pub(super) async fn export(State(context): State<PageContext>) -> Response {
    let exported = context.agent.podcasts.export().await;
    list_answer(&context, exported)
}

/// Gives all subscriptions as a list for other apps on this machine, whose episodes come through the agent, if they have
/// access.
pub(super) async fn export_for_apps(State(context): State<PageContext>) -> Response {
    let exported = context.agent.opml_of_open_apps().await;
    let exported = exported.and_then(|list| {
        list.ok_or_else(|| {
            let text = "No app has access, so there is no list for apps. The settings of podcasts give it.";
            TransferFailure::error(text)
        })
    });
    list_answer(&context, exported)
}

fn list_answer(context: &PageContext, exported: Result<String, TransferFailure>) -> Response {
    match exported {
        Ok(text) => {
            let fields = [
                (CONTENT_TYPE, "text/x-opml; charset=utf-8"),
                (
                    CONTENT_DISPOSITION,
                    "attachment; filename=\"subscriptions.opml\"",
                ),
            ];
            (fields, text).into_response()
        }
        Err(failure) => frame::problem(context, &failure),
    }
}
