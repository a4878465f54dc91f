import pytest
import runs


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return runs.write_data(tmp_path_factory.mktemp("data"))
