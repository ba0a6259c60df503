//! `outbox-relay publication`: shown as it is, judged as the relay judges it.

use serde_json::{Value, json};

use super::{assert_shape, expect};
use crate::harness::nats::NatsVersion;
use crate::harness::postgres::PgVersion;
use crate::harness::scene::Scene;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publication_is_made_shown_and_judged() {
    let shape = json!({
        "name": "string", "ours": "boolean", "owner": "string", "all_tables": "boolean", "operations": ["string"],
        "via_partition_root": "boolean", "fit": "boolean", "problem": "string|null", "warnings": ["string"],
        "tables": [{
            "schema": "string", "table": "string", "outbox": "boolean", "columns": "list|null", "row_filter": "string|null",
        }],
    });
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let (settings, name) = (&scene.settings, scene.database.publication.as_str());
        let missing = expect(settings, &["publication", "show"], 1).await;
        assert!(missing.one_line().contains("CREATE PUBLICATION"), "{missing:?}");
        assert!(missing.one_line().contains("outbox-relay publication create"), "{missing:?}");
        expect(settings, &["publication", "create"], 0).await;
        let again = expect(settings, &["publication", "create"], 1).await;
        assert!(again.one_line().contains("exists already"), "{again:?}");

        let show = async || {
            let shown = expect(settings, &["publication", "show", "--output", "json"], 0).await.json();
            assert_shape(&shown, &shape);
            shown
        };
        let shown = show().await;
        assert_eq!((&shown["fit"], &shown["ours"], &shown["name"]), (&json!(true), &json!(true), &json!(name)));
        assert_eq!((&shown["operations"], &shown["problem"]), (&json!(["insert"]), &Value::Null));
        let table = json!({
            "schema": "public", "table": "outbox_events", "outbox": true, "columns": null, "row_filter": null,
        });
        assert_eq!((&shown["tables"], &shown["warnings"]), (&json!([table]), &json!([])));

        scene.sql(&format!("ALTER PUBLICATION {name} SET (publish = 'insert, update')")).await;
        let shown = show().await;
        assert_eq!((&shown["fit"], &shown["operations"]), (&json!(true), &json!(["insert", "update"])));
        assert!(shown["warnings"][0].as_str().unwrap().contains("more than inserts"), "{shown}");
        let table = "CREATE TABLE IF NOT EXISTS other (id int, kept int)";
        scene.sql(&format!("{table}; ALTER PUBLICATION {name} SET (publish = 'insert')")).await;
        scene.sql(&format!("ALTER PUBLICATION {name} SET TABLE other (id), outbox_events WHERE (id > 5)")).await;
        let shown = show().await;
        assert_eq!((&shown["tables"][0]["columns"], &shown["tables"][0]["outbox"]), (&json!(["id"]), &json!(false)));
        assert_eq!(shown["tables"][1]["row_filter"], json!("(id > 5)"));
        scene.sql(&format!("ALTER PUBLICATION {name} DROP TABLE outbox_events")).await;
        let shown = show().await;
        assert_eq!(shown["fit"], json!(false));
        assert!(shown["problem"].as_str().unwrap().contains("ADD TABLE"), "{shown}");
        let table = expect(settings, &["publication", "show", name], 0).await.stdout;
        assert!(table.contains("unfit: ") && table.contains("public.other"), "{table}");
    }
}

/// Who may not make it is told who may.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_does_not_own_the_table_is_told_so() {
    let scene = Scene::new().await;
    let role = format!("{}_reader", scene.database.name);
    scene.sql(&format!("CREATE ROLE {role} LOGIN")).await;
    let url = scene.database.url().replace("postgres@", &format!("{role}@"));
    let refused = expect(&scene.settings.clone().set("postgres.url", &url), &["publication", "create"], 1).await;
    assert!(refused.one_line().contains("table's owner"), "{refused:?}");
    scene.sql(&format!("DROP ROLE {role}")).await;
}
