"""TGIS's API over gRPC, `fmaas.GenerationService`."""
