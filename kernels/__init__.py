"""Operations: a folder each, with a torch reference that judges faster versions."""
