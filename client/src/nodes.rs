//! Nodes, through the service `Control`.

use mvm_proto::wire::control::v1::{ListNodesRequest, Node};

use crate::connect::ControlClient;

/// Every node, page by page; `summary` as in the request.
pub async fn list_all_nodes(client: &mut ControlClient, summary: bool) -> Result<Vec<Node>, tonic::Status> {
    let mut nodes: Vec<Node> = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListNodesRequest { page_size: 0, page_token: page_token.clone(), summary };
        let page = client.list_nodes(request).await?.into_inner();
        nodes.extend(page.nodes);
        // Tokens grow, so that the pages have an end whatever the coordinator says.
        if page.next_page_token <= page_token {
            return Ok(nodes);
        }
        page_token = page.next_page_token;
    }
}
