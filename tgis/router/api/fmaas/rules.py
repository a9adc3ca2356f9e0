"""Rules of TGIS's API."""

from tgis.router.requests.api_rules import ApiRules

FMAAS = ApiRules("fmaas", rpc_service="fmaas.GenerationService", is_logged=False)
