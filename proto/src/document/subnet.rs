//! Tenant subnets.
use super::Subnet;

impl TryFrom<String> for Subnet {
    type Error = String;
    fn try_from(_: String) -> Result<Self, String> {
        todo!()
    }
}
impl From<Subnet> for String {
    fn from(s: Subnet) -> String {
        format!("{}/{}", s.address, s.prefix)
    }
}
impl schemars::JsonSchema for Subnet {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Subnet".into()
    }
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string" })
    }
}
