"""The API of TGIS, `fmaas.GenerationService`, over gRPC."""
