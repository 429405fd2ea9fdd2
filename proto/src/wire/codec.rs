//! The codec of the operators' gRPC service, on both sides: protobuf that is measured before it is decoded.

use std::marker::PhantomData;

use bytes::Buf as _;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

use super::measure::{self, Shaped};

/// The most memory that one message may take. Its bytes are bounded where the service is built, by the largest
/// document; lists come in pages that take far less.
pub const MAX_MESSAGE_MEMORY: usize = 64 * 1024 * 1024;

#[derive(Debug, Clone)]
pub struct MeasuredCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for MeasuredCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for MeasuredCodec<T, U>
where
    T: prost::Message + Send + 'static,
    U: Shaped + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = MeasuredDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(BufferSettings::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        MeasuredDecoder(PhantomData)
    }
}

#[derive(Debug, Clone)]
pub struct MeasuredDecoder<U>(PhantomData<U>);

impl<U: Shaped> Decoder for MeasuredDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let bytes = bytes.copy_to_bytes(bytes.remaining());
        let decoded = measure::decode(bytes, MAX_MESSAGE_MEMORY);
        decoded.map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}
