"""Operations in C++ for fp32 on a CPU, and what recording them needs."""
