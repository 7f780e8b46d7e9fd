// One translation unit: most of the time of compiling goes into PyTorch's headers.
#include "bindings.cpp"
#include "device.cpp"
#include "memory.cpp"
#include "operators.cpp"
#include "process_group.cpp"
#include "streams.cpp"
