"""The name `warren` of Spark: `spark.read.format("warren")`, `spark.readStream`, `df.write` and `df.writeStream`.

What each of them does is in a module of its own, imported when it is asked for: Spark imports this one in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class WarrenSource(DataSource):
    """Queues of a Warren store or broker as tables, streams and sinks.

    >>> WarrenSource({"path": "data", "queue": "orders", "columns": "seq_id,body"}).schema()
    'seq_id BIGINT, body BINARY'

    In a session: `spark.read.format("warren").load("data", queue="orders").select("seq_id", "body")`.
    """

    @classmethod
    def name(cls) -> str:
        return "warren"

    def schema(self) -> str:
        from warren.pipeline.options import columns_of, table_of
        from warren.pipeline.schema import spark_ddl

        table = table_of(self.options)
        if table != "messages":
            from warren.pipeline.tables import table_ddl

            return table_ddl(table, columns_of(self.options))
        return spark_ddl(columns_of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from warren.pipeline.broker_client import forget_secrets
        from warren.pipeline.options import table_of
        from warren.pipeline.schema import ALL_COLUMNS, arrow_schema, arrow_schema_of

        table = table_of(self.options)
        if table != "messages":
            from warren.pipeline.tables import WarrenTableReader, table_schema

            tables = WarrenTableReader(self.options, arrow_schema_of(schema, table_schema(table)))
            forget_secrets(self.options)
            return tables
        from warren.pipeline.batch_source import WarrenBatchReader

        messages = WarrenBatchReader(self.options, arrow_schema_of(schema, arrow_schema(ALL_COLUMNS)))
        forget_secrets(self.options)
        return messages

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self.options.get("mode", "consume").strip().lower() == "tap":
            from warren.pipeline.tap_source import TapStreamReader

            return TapStreamReader(self.options, schema)
        from warren.pipeline.stream_source import WarrenStreamReader

        return WarrenStreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from warren.pipeline.sink import WarrenBatchWriter

        _refuse_overwrite(overwrite)
        return WarrenBatchWriter(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from warren.pipeline.sink import WarrenStreamWriter

        _refuse_overwrite(overwrite)
        return WarrenStreamWriter(self.options, schema)


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        from warren.pipeline.errors import OptionError

        raise OptionError("an exchange cannot be overwritten; write with mode('append')")
