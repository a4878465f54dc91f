// Codes of BITS bits, uint8 up to 8, uint16 above, and as many buckets.

constexpr int BUCKETS = 1 << BITS;
template <bool WIDE> struct CodeType { using type = unsigned char; };
template <> struct CodeType<true> { using type = unsigned short; };
using Code = CodeType<(BITS > 8)>::type;
