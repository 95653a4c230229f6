"""Operations: `ops` defines them in torch, `dispatch` chooses the implementation."""
